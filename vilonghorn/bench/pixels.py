"""How far pixels are from those of timm's PIL pipeline: crops that are read through FFCV, operations on a batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from timm.data import create_transform
from timm.data.auto_augment import NAME_TO_OP

from ..data import ImageFolder, create_loader, write_beton
from ..data.augment import ops as pixels
from ..data.augment.policy import Policy
from ..data.crops import center_crops

MEAN = (0.485, 0.456, 0.406)
COMPARED = 64  # images; each is done to by each operation
POLICY = "rand-m9-mstd0.5-inc1"


def report_pixels(folder: Path, temporary: Path, size: int) -> None:
    """Prints both tables.

    Args:
        folder: an image folder.
        temporary: where files may be written.
        size: side of the crops, in pixels.
    """
    files = ImageFolder(folder)
    count = min(COMPARED, len(files))
    print(f"\nMean absolute difference to PIL in levels of 255, of {count} images.\n")
    print("| evaluation: crop 0.875 of a .beton | to timm's Resize and CenterCrop, bicubic | to PIL's box average |")
    print("|---|---|---|")
    transform = create_transform(size, interpolation="bicubic", crop_pct=0.875, use_prefetcher=True)
    images = [files[i][0] for i in range(count)]
    timms = np.stack([np.asarray(transform(image)) for image in images]).astype(float)
    box = np.stack([_box_average(image, size) for image in images])
    for mode in ("raw", "jpg"):
        path = temporary / f"pixels-{mode}.beton"
        write_beton([(image, 0) for image in images], path, mode=mode, progress=False)
        for interpolation in ("bicubic", "area"):
            options = {"batch_size": count, "image_size": size, "mean": (0, 0, 0), "std": (1 / 255,) * 3}
            loader = create_loader(path, training=False, interpolation=interpolation, **options)
            found = next(loader.epoch(0))[0].double().numpy()
            differences = (np.abs(found - other).mean() for other in (timms, box))
            print(f"| {mode}, {interpolation} | " + " | ".join(f"{d:.2f}" for d in differences) + " |")
    print(f"\n| operation, arguments as {POLICY} draws them | mean | worst image |\n|---|---|---|")
    squares = [image.resize((size, size), Image.Resampling.BICUBIC) for image in images]
    for name, mean, worst in operation_differences(squares):
        print(f"| {name} | {mean:.2f} | {worst:.2f} |")


def _box_average(image: Image.Image, size: int) -> np.ndarray:
    top, bottom, left, right = center_crops(*np.array([[image.height], [image.width]]), (size, size), 0.875)[0].tolist()
    averaged = image.resize((size, size), Image.Resampling.BOX, box=(left, top, right, bottom))
    return np.asarray(averaged, float).transpose(2, 0, 1)


def operation_differences(images: list[Image.Image]) -> list[tuple[str, float, float]]:
    """For each operation of RandAugment: its name, and mean and largest over images of the difference to PIL.

    Args:
        images: RGB, all of one size.
    """
    policy = Policy(POLICY, MEAN)
    batch = torch.stack([torch.from_numpy(np.array(image)) for image in images]).permute(0, 3, 1, 2)
    keywords = {"fillcolor": policy.fill, "resample": Image.Resampling.BICUBIC}
    drawn: dict[str, list] = {}
    for step in policy.plan(0, 0, np.arange(len(images) * 60)):
        drawn.setdefault(step.name, []).extend([None] * len(step.rows) if step.arguments is None else step.arguments)
    results = []
    for name, arguments in sorted(drawn.items()):
        if name == "PosterizeIncreasing":  # PIL refuses to keep no bit at all
            arguments = [argument for argument in arguments if argument >= 1]
        arguments = arguments[: len(images)]
        tensor = None if arguments[0] is None else torch.tensor(arguments, dtype=torch.float32)
        found = pixels.apply(name, batch[: len(arguments)], tensor, policy.fill).permute(0, 2, 3, 1).double().numpy()
        whole = name.startswith(("Posterize", "Solarize"))
        differences = []
        for image, argument, result in zip(images, arguments, found):
            given = () if argument is None else (int(argument) if whole else float(argument),)
            expected = np.asarray(NAME_TO_OP[name](image, *given, **keywords), float)
            differences.append(np.abs(result - expected).mean())
        results.append((name, float(np.mean(differences)), float(np.max(differences))))
    return results
