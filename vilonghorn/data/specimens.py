"""The real handwritten digits that tasks are made of, in three disjoint sets: to train on, to choose by, to test on.

They are scikit-learn's (UCI optdigits' test set, 1,797 images of 8 x 8 pixels, 17 grey levels), so nothing is downloaded.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from PIL import Image

SPLITS = ("train", "val", "test")
OF_FIVE = {"test": (4,), "val": (3,), "train": (0, 1, 2)}  # positions, modulo 5, among the images of one digit
PIXELS = 8  # side of an original digit


class Specimens(NamedTuple):
    """Digits of one split.

    Attributes:
        indices: (n,) positions in `sklearn.datasets.load_digits`.
        images: (n, 8, 8) uint8, 0 is the ground and 255 full ink.
        labels: (n,) int64, 0 to 9.
        of: for each digit, the positions in this split of its images.
    """

    indices: np.ndarray
    images: np.ndarray
    labels: np.ndarray
    of: tuple[np.ndarray, ...]


@lru_cache
def specimens(split: str) -> Specimens:
    """The digits of a split, in scikit-learn's order.

    Of the images of each digit in that order, those at positions 4, 9, 14, ... are "test" (the 355 that `write_digits`
    holds out as well), those at 3, 8, 13, ... "val" (357), the others "train" (1,085).

    Raises:
        ImportError: scikit-learn is not installed.
        ValueError: there is no such split.
    """
    if split not in SPLITS:
        raise ValueError(f"split {split!r}: expected one of {', '.join(SPLITS)}")
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("the digits come with scikit-learn; run: pip install scikit-learn") from error
    digits = load_digits()
    labels = digits.target.astype(np.int64)
    place = np.empty(len(labels), np.int64)  # among the images of the same digit
    for digit in range(10):
        same = labels == digit
        place[same] = np.arange(same.sum())
    indices = np.flatnonzero(np.isin(place % 5, OF_FIVE[split]))
    labels = labels[indices]
    of = tuple(np.flatnonzero(labels == digit) for digit in range(10))
    return Specimens(indices, to_bytes(digits.images[indices]), labels, of)


def to_bytes(ink: np.ndarray) -> np.ndarray:
    """Grey levels 0 to 16 as uint8."""
    return np.rint(ink * (255 / 16)).astype(np.uint8)


def enlarged(image: np.ndarray, side: int) -> Image.Image:
    """One digit, (8, 8) uint8, resized by bicubic interpolation to `side` pixels."""
    return Image.fromarray(image).resize((side, side), Image.Resampling.BICUBIC)
