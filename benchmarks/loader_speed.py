"""Images a second of our loaders and of timm's: `python benchmarks/loader_speed.py`. docs/data.md quotes the tables."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import timm.data
import torch
from jsonargparse.typing import PositiveInt
from page_tables import markdown
from PIL import Image
from tqdm import tqdm

from vilonghorn.data import ImageFolder, Loader, create_loader, write_beton

MODES = ("jpg", "raw")
POLICY = "rand-m9-mstd0.5-inc1"
TIMM, OURS = "timm, PIL", "ours, jpg"
TARGET = 1.3  # of timm's images a second, for a .beton of JPEG


def make_photos(folder: Path, count: int, width: int, height: int) -> None:
    """Makes an image folder of two classes: JPEGs at quality 90, of about the size and detail of photographs."""
    rng = np.random.default_rng(0)
    for i in range(count):
        layers = np.zeros((height, width, 3), np.float32)
        for cells, share in ((4, 80), (16, 40), (64, 20), (200, 10)):
            noise = Image.fromarray(rng.integers(0, 256, (cells, cells, 3), dtype=np.uint8))
            smooth = np.asarray(noise.resize((width, height), Image.Resampling.BICUBIC), np.float32)
            layers += share * (smooth / 127.5 - 1)
        file = folder / f"class{i % 2}" / f"{i:05d}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.clip(128 + layers, 0, 255).astype(np.uint8)).save(file, quality=90)


def timm_loader(folder: Path, options: argparse.Namespace, augment: bool) -> torch.utils.data.DataLoader:
    """The loader of timm. On a CPU it has no prefetcher, which needs CUDA."""
    return timm.data.create_loader(
        timm.data.create_dataset("", root=str(folder)),
        input_size=(3, options.image_size, options.image_size),
        batch_size=options.batch,
        is_training=True,
        use_prefetcher=options.device != "cpu",
        device=torch.device(options.device),
        re_prob=0.25 if augment else 0.0,
        re_mode="pixel",
        color_jitter=None,
        auto_augment=f"{POLICY}-mmax9" if augment else None,  # Pillow 13 refuses to posterize to 0 bits
        interpolation="bicubic",
        num_workers=options.workers,
        persistent_workers=True,
    )


def images_per_second(loader: Loader | torch.utils.data.DataLoader, epoch: int, device: str) -> float:
    """Reads an epoch, from its start to its last batch on the device."""
    start, count = time.perf_counter(), 0
    for images, _ in loader.epoch(epoch) if isinstance(loader, Loader) else loader:
        count += len(images)
    if device != "cpu":
        torch.cuda.synchronize()
    return count / (time.perf_counter() - start)


def report_speed(folder: Path, temporary: Path, options: argparse.Namespace) -> bool:
    """Prints images a second, interleaved over the loaders, and the files. Returns whether the target was met."""
    files, lines = {}, []
    for mode in MODES:
        files[mode], start = temporary / f"{mode}.beton", time.perf_counter()
        write_beton(folder, files[mode], mode=mode, workers=options.workers, progress=False)
        count, size = len(ImageFolder(folder)), files[mode].stat().st_size
        line = {"file": mode, "MB": f"{size / 1e6:.0f}", "bytes/image": f"{size / count:.0f}"}
        lines.append(line | {"written, images/s": f"{count / (time.perf_counter() - start):.0f}"})
    print(f"\n{markdown(lines)}")
    common = dict(batch_size=options.batch, image_size=options.image_size, training=True)
    ours = partial(create_loader, workers=options.workers, device=options.device, **common)
    for augment in (True, False)[options.crops_only :]:
        recipe = dict(auto_augment=f"{POLICY}-mmax9", erase=0.25) if augment else {}
        loaders = {TIMM: timm_loader(folder, options, augment)}
        loaders |= {f"ours, {mode}": ours(file, **recipe) for mode, file in files.items()}
        loaders["ours, jpg, bicubic"] = ours(files["jpg"], interpolation="bicubic", **recipe)
        loaders["ours, folder"] = ours(folder, **recipe)
        speeds: dict[str, list[float]] = {name: [] for name in loaders}
        for i in tqdm(range(options.rounds + 1), desc="rounds", leave=False):
            for name, loader in loaders.items():
                speed = images_per_second(loader, i, options.device)
                speeds[name] += [speed] * (i > 0)  # the first round compiles and starts workers
        lines, ratios = [], {}
        for name, values in speeds.items():
            ratios[name] = statistics.median(a / b for a, b in zip(values, speeds[TIMM]))
            line = {"with RandAugment and erasing" if augment else "crop and flip": name}
            line |= {"images/s, median": f"{statistics.median(values):.0f}"}
            line |= {
                "lowest to highest": f"{min(values):.0f} to {max(values):.0f}",
                "times timm's": f"{ratios[name]:.2f}",
            }
            lines.append(line)
        print(f"\n{markdown(lines)}")
    print(f"\n{markdown(list(checksum_costs(files, options)))}")
    verdict = "met" if ratios[OURS] >= TARGET else "NOT MET"
    print(f"\ntarget: a .beton of JPEG at {TARGET} times the speed of timm's loader: {ratios[OURS]:.2f}, {verdict}")
    return ratios[OURS] >= TARGET


def checksum_costs(files: dict[str, Path], options: argparse.Namespace) -> Iterator[dict[str, str]]:
    """Yields the processor time that checksums add to the first epoch, the only one that compares them.

    New loaders with and without checksums alternate. They crop and flip.
    """
    common = dict(batch_size=options.batch, image_size=options.image_size, training=True, workers=options.workers)
    for mode, file in files.items():
        ratios = []
        for i in range(options.rounds):
            seconds = {}
            for checksums in (False, True) if i % 2 else (True, False):
                loader = create_loader(file, checksums=checksums, device=options.device, **common)
                start = time.process_time()
                images_per_second(loader, i, options.device)
                seconds[checksums] = time.process_time() - start
            ratios.append(seconds[True] / seconds[False])
        more = [f"{100 * (ratio - 1):+.1f}%" for ratio in (statistics.median(ratios), min(ratios), max(ratios))]
        yield {"first epoch": mode, "checksums: processor time, median": more[0], "range": f"{more[1]} to {more[2]}"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. The exit status is 1 if the target is not met."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, help="image folder to load (default: one that is made)")
    parser.add_argument("--images", type=PositiveInt, default=600, help="images to make (default: 600)")
    parser.add_argument(
        "--size", type=PositiveInt, nargs=2, default=(500, 400), metavar=("W", "H"), help="their pixels"
    )
    parser.add_argument("--batch", type=PositiveInt, default=64)
    parser.add_argument("--image-size", type=PositiveInt, default=224)
    parser.add_argument("--workers", type=PositiveInt, default=2)
    parser.add_argument("--rounds", type=PositiveInt, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--crops-only", action="store_true", help="leave out the loaders with RandAugment and erasing")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.workers)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary) / "photos"
        if options.folder is None:
            make_photos(folder, options.images, *options.size)
        print(f"{options.workers} workers, {len(ImageFolder(folder))} images, batch {options.batch}, ", end="")
        print(f"{options.image_size} px, device {options.device}, torch {torch.__version__}")
        return 0 if report_speed(folder, Path(temporary), options) else 1


if __name__ == "__main__":
    sys.exit(main())
