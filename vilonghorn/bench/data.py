"""`python -m vilonghorn.bench.data`: images a second of every way to load them, against timm's loader.

With --pixels: how far the batches are from what timm's PIL pipeline makes of the same images. docs/data.md holds both.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import timm.data
import torch
from PIL import Image
from tqdm import tqdm

from ..data import ImageFolder, create_loader, write_beton
from ..data.threads import available_cpus
from .pixels import report_pixels

# At full magnitude timm asks PIL to keep no bit of an image, which Pillow 13 refuses: its own loader ends there.
RECIPE = {"auto_augment": "rand-m9-mstd0.5-inc1-mmax9", "erase": 0.25}
TARGET = 1.3  # of timm's images a second, for a .beton of JPEG
Epochs = Callable[[int], Iterator]


def make_photos(folder: Path, count: int, width: int, height: int) -> None:
    """Makes an image folder of JPEGs at quality 90, of about the size and detail of photographs.

    Args:
        folder: where to; two classes.
        count: images.
        width, height: of each, in pixels.
    """
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


def timms_loader(folder: Path, batch: int, size: int, workers: int, device: str, recipe: bool) -> Epochs:
    """timm's own loader of a training set, of PIL images; on a CPU without its prefetcher, which needs CUDA."""
    loader = timm.data.create_loader(
        timm.data.create_dataset("", root=str(folder)),
        input_size=(3, size, size),
        batch_size=batch,
        is_training=True,
        use_prefetcher=device != "cpu",
        device=torch.device(device),
        re_prob=RECIPE["erase"] if recipe else 0.0,
        re_mode="pixel",
        color_jitter=None,
        auto_augment=RECIPE["auto_augment"] if recipe else None,
        interpolation="bicubic",
        num_workers=workers,
        persistent_workers=True,
    )
    return lambda epoch: iter(loader)


def our_loader(source: Path, batch: int, size: int, workers: int, device: str, **options) -> Epochs:
    """A loader of `vilonghorn.data`."""
    settings = {"batch_size": batch, "image_size": size, "training": True, "workers": workers, "device": device}
    return create_loader(source, **settings, **options).epoch


def images_per_second(epochs: Epochs, epoch: int, device: str) -> float:
    """Reads an epoch, from its start to its last batch on the device."""
    start, count = time.perf_counter(), 0
    for images, _ in epochs(epoch):
        count += len(images)
    if device != "cpu":
        torch.cuda.synchronize()
    return count / (time.perf_counter() - start)


def in_turns(loaders: dict[str, Epochs], rounds: int, device: str) -> dict[str, list[float]]:
    """Images a second of every loader in every round; a first round, of compilation and start, is not counted."""
    speeds: dict[str, list[float]] = {name: [] for name in loaders}
    for turn in tqdm(range(rounds + 1), desc="rounds", leave=False):
        for name, epochs in loaders.items():
            speed = images_per_second(epochs, turn, device)
            if turn > 0:
                speeds[name].append(speed)
    return speeds


def report_speed(folder: Path, options: argparse.Namespace) -> bool:
    """Prints the table of speeds; returns whether the target was met."""
    common = (options.batch, options.image_size, options.workers, options.device)
    files, seconds = {}, {}
    for mode in ("jpg", "proportion", "raw"):
        files[mode] = folder.with_name(f"{mode}.beton")
        start = time.perf_counter()
        write_beton(folder, files[mode], mode=mode, workers=options.workers, progress=False)
        seconds[mode] = time.perf_counter() - start
    count = len(ImageFolder(folder))
    plain = {
        "timm, PIL": timms_loader(folder, *common, recipe=False),
        "ours, folder": our_loader(folder, *common),
        **{f"ours, {mode}": our_loader(file, *common) for mode, file in files.items()},
        "ours, jpg, bicubic": our_loader(files["jpg"], *common, interpolation="bicubic"),
    }
    recipe = {
        "timm, PIL": timms_loader(folder, *common, recipe=True),
        **{f"ours, {mode}": our_loader(file, *common, **RECIPE) for mode, file in files.items()},
        "ours, jpg, bicubic": our_loader(files["jpg"], *common, interpolation="bicubic", **RECIPE),
    }
    ratios = {}
    tables = {"crop and flip": plain} | ({} if options.crops_only else {"with RandAugment and erasing": recipe})
    for title, loaders in tables.items():
        speeds = in_turns(loaders, options.rounds, options.device)
        print(f"\n| {title} | images/s, median | lowest to highest | times timm's |\n|---|---|---|---|")
        for name, values in speeds.items():
            ratio = statistics.median(a / b for a, b in zip(values, speeds["timm, PIL"]))
            ratios[title, name] = ratio
            middle = statistics.median(values)
            print(f"| {name} | {middle:.0f} | {min(values):.0f} to {max(values):.0f} | {ratio:.2f} |")
    print("\n| file | MB | bytes/image | written, images/s |\n|---|---|---|---|")
    for mode, file in files.items():
        size = file.stat().st_size
        print(f"| {mode} | {size / 1e6:.0f} | {size / count:.0f} | {count / seconds[mode]:.0f} |")
    reached = ratios["crop and flip", "ours, jpg"]
    verdict = "met" if reached >= TARGET else "missed"
    print(f"\ntarget: a .beton of JPEG at {TARGET} times timm's loader, by the median: {reached:.2f}, {verdict}")
    return reached >= TARGET


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: the command line without the program's name; default that of the process.

    Returns:
        The exit status: 0, or 1 where the target was missed.
    """
    parser = argparse.ArgumentParser(prog="python -m vilonghorn.bench.data", description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, help="image folder to load (default: one that is made)")
    parser.add_argument("--images", type=int, default=600, help="images to make (default: 600)")
    parser.add_argument("--size", type=int, nargs=2, default=(500, 400), metavar=("W", "H"), help="of them, in pixels")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--crops-only", action="store_true", help="leave out the loaders with the whole augmentation")
    parser.add_argument("--pixels", action="store_true", help="compare pixels with timm's PIL pipeline, not speeds")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.workers)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary) / "photos"
        if options.folder is None:
            make_photos(folder, options.images, *options.size)
        elif not options.pixels:  # the files are written beside the folder's name, in the temporary folder
            link = Path(temporary) / "photos"
            link.symlink_to(folder.resolve(), target_is_directory=True)
            folder = link
        print(f"{available_cpus()} CPUs, {options.workers} workers, {len(ImageFolder(folder))} images, ", end="")
        print(f"batch {options.batch}, {options.image_size} px, device {options.device}, torch {torch.__version__}")
        if options.pixels:
            report_pixels(folder, Path(temporary), options.image_size)
            return 0
        return 0 if report_speed(folder, options) else 1


if __name__ == "__main__":
    sys.exit(main())
