"""Compares the pixels of our batches to those of timm's PIL pipeline: `python benchmarks/pixels.py [FOLDER]`.

Without an image folder, it makes 64 photographs. docs/data.md quotes the tables.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import timm.data
import torch
from loader_speed import POLICY, make_photos
from page_tables import markdown
from PIL import Image
from timm.data.auto_augment import NAME_TO_OP

from vilonghorn.data import ImageFolder, create_loader, write_beton
from vilonghorn.data.augment import ops
from vilonghorn.data.augment.policy import Policy
from vilonghorn.data.loaders.ffcv import center_crops


def report_pixels(folder: Path, temporary: Path, size: int, most: int = 64) -> None:
    """Prints the mean absolute difference to PIL in levels of 255: evaluation crops, then RandAugment's operations."""
    files = ImageFolder(folder)
    images = [files[i][0] for i in range(min(most, len(files)))]
    transform = timm.data.create_transform(size, interpolation="bicubic", crop_pct=0.875, use_prefetcher=True)
    expected = {"timm's Resize and CenterCrop, bicubic": np.stack([transform(image) for image in images]).astype(float)}
    expected["PIL's box average"] = np.stack([_box_average(image, size) for image in images])
    lines = []
    for mode in ("raw", "jpg"):
        path = temporary / f"pixels-{mode}.beton"
        write_beton([(image, 0) for image in images], path, mode=mode, progress=False)
        for interpolation in ("bicubic", "area"):
            options = dict(batch_size=len(images), image_size=size, mean=(0, 0, 0), std=(1 / 255,) * 3)
            loader = create_loader(path, training=False, interpolation=interpolation, **options)
            found = next(loader.epoch(0))[0].double().numpy()
            line = {"evaluation: crop 0.875 of a .beton": f"{mode}, {interpolation}"}
            lines.append(
                line | {f"to {name}": f"{np.abs(found - other).mean():.2f}" for name, other in expected.items()}
            )
    print(f"\nMean absolute difference in levels of 255, of {len(images)} images.\n\n{markdown(lines)}\n")
    lines = []
    for name, differences in operation_differences([image.resize((size, size)) for image in images]).items():
        line = {f"operation of {POLICY}, to PIL's": name, "mean": f"{np.mean(differences):.2f}"}
        lines.append(line | {"worst image": f"{np.max(differences):.2f}"})
    print(markdown(lines))


def _box_average(image: Image.Image, size: int) -> np.ndarray:
    top, bottom, left, right = center_crops(*np.array([[image.height], [image.width]]), 0.875)[0].tolist()
    averaged = image.resize((size, size), Image.Resampling.BOX, box=(left, top, right, bottom))
    return np.asarray(averaged, float).transpose(2, 0, 1)


def operation_differences(images: list[Image.Image]) -> dict[str, list[float]]:
    """By operation of RandAugment, the mean absolute difference of each image to PIL's. All images are of one size."""
    policy = Policy(POLICY, (0.485, 0.456, 0.406))
    batch = torch.stack([torch.from_numpy(np.array(image)) for image in images]).permute(0, 3, 1, 2)
    drawn: dict[str, list] = {}
    for name, rows, arguments in policy.plan(0, 0, np.arange(len(images) * 60)):
        drawn.setdefault(name, []).extend([None] * len(rows) if arguments is None else arguments)
    differences: dict[str, list[float]] = {}
    for name, arguments in sorted(drawn.items()):
        if name == "PosterizeIncreasing":  # PIL refuses to keep no bit
            arguments = [argument for argument in arguments if argument >= 1]
        arguments = arguments[: len(images)]
        values = None if arguments[0] is None else torch.tensor(arguments, dtype=torch.float32)
        found = ops.apply(name, batch[: len(arguments)], values, policy.fill).permute(0, 2, 3, 1).double().numpy()
        number = int if name.startswith(("Posterize", "Solarize")) else float
        apply = partial(NAME_TO_OP[name], fillcolor=policy.fill, resample=Image.Resampling.BICUBIC)
        for image, argument, result in zip(images, arguments, found):
            expected = np.asarray(apply(image, *([] if argument is None else [number(argument)])), float)
            differences.setdefault(name, []).append(float(np.abs(result - expected).mean()))
    return differences


def main() -> None:
    """Compares the images of a folder, or photographs that it makes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "folder", nargs="?", type=Path, metavar="FOLDER", help="image folder (default: one that is made)"
    )
    folder = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as temporary:
        if folder is None:
            folder = Path(temporary) / "photos"
            make_photos(folder, 64, 500, 400)
        report_pixels(folder, Path(temporary), 224)


if __name__ == "__main__":
    main()
