"""scikit-learn's handwritten digits: 1,797 real images of 8 x 8 pixels, split in three, for tasks without a download.

`vilonghorn data digits DST` writes them as an image folder to train on.
"""

import os
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from .files import atomic_folder

SPLITS = ("train", "val", "test")
PIXELS = 8  # side of an original image
SIDE = 32  # side of a written image, bicubic: a model with patch size 4 sees 64 tokens


class Digits(NamedTuple):
    """The digits of a split, in scikit-learn's order."""

    indices: np.ndarray  # (n,) positions in `sklearn.datasets.load_digits`
    images: np.ndarray  # (n, 8, 8) uint8, 0 is the background and 255 full ink
    labels: np.ndarray  # (n,) int64, 0 to 9
    by_label: tuple[np.ndarray, ...]  # for each label, the positions in this split of its images


@lru_cache
def load_split(split: str) -> Digits:
    """The digits of a split (UCI optdigits' test set, 17 grey levels).

    Of the images of each digit, in scikit-learn's order, those at positions 4, 9, 14, ... are "test" (355), those at
    3, 8, 13, ... "val" (357), the others "train" (1,085).

    Raises:
        ImportError: scikit-learn is not installed.
        ValueError: there is no such split.
    """
    if split not in SPLITS:
        raise ValueError(f"split {split!r}: expected one of {', '.join(SPLITS)}")
    try:
        from sklearn import datasets
    except ImportError as error:
        raise ImportError("the digits come with scikit-learn; run: pip install scikit-learn") from error
    digits = datasets.load_digits()
    labels = digits.target.astype(np.int64)
    chosen = {"test": every_fifth(labels, 4), "val": every_fifth(labels, 3)}
    chosen["train"] = ~(chosen["test"] | chosen["val"])
    indices = np.flatnonzero(chosen[split])
    labels = labels[indices]
    images = np.rint(digits.images[indices] * (255 / 16)).astype(np.uint8)
    return Digits(indices, images, labels, tuple(np.flatnonzero(labels == digit) for digit in range(10)))


def every_fifth(labels: np.ndarray, start: int) -> np.ndarray:
    """(n,) bool, the samples at positions `start`, `start` + 5, ... among those of their class, in their order."""
    chosen = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        chosen[np.flatnonzero(labels == label)[start::5]] = True
    return chosen


def enlarge(image: np.ndarray, side: int) -> Image.Image:
    """One digit, (8, 8) uint8, resized by bicubic interpolation to `side` pixels."""
    return Image.fromarray(image).resize((side, side), Image.Resampling.BICUBIC)


def write_digits(target: str | os.PathLike) -> bool:
    """Writes the digits as `target/{train,val}/{0..9}/NNNN.png`, 32 x 32 pixels, unless they are there already.

    NNNN is the position in `sklearn.datasets.load_digits`. The folder `val` holds the split "test" (355 images), the
    folder `train` the others (1,442). Returns whether anything was written.

    Raises:
        FileExistsError: `target` exists and is not this dataset.
        ImportError: scikit-learn is not installed.
    """
    target = Path(target)
    images = {
        f"{folder}/{label}/{index:04d}.png": image
        for split, folder in zip(SPLITS, ("train", "train", "val"))
        for index, image, label in zip(*load_split(split)[:3])
    }
    if target.exists():
        if target.is_dir() and {p.relative_to(target).as_posix() for p in target.rglob("*.*")} == images.keys():
            return False
        raise FileExistsError(f"{target}: exists and is not the complete set of digits; remove it or give another name")
    with atomic_folder(target) as partial:
        for name, image in images.items():
            file = partial / name
            file.parent.mkdir(parents=True, exist_ok=True)
            enlarge(image, SIDE).save(file)
    return True
