"""The splits of scikit-learn's handwritten digits from which the tasks of recall are made."""

from functools import cache
from typing import NamedTuple

import numpy as np

from vilonghorn.data.digits import every_fifth, load_digits

SPLITS = ("train", "val", "test")
PIXELS = 8  # side of an image


def check_split(split: str) -> None:
    """Raises ValueError for an unknown split."""
    if split not in SPLITS:
        raise ValueError(f"split {split!r}: expected one of {', '.join(SPLITS)}")


class Digits(NamedTuple):
    """The digits of a split, in scikit-learn's order."""

    indices: np.ndarray  # (n,) positions in `sklearn.datasets.load_digits`
    images: np.ndarray  # (n, 8, 8) uint8, 0 is the background and 255 full ink
    labels: np.ndarray  # (n,) int64, 0 to 9
    by_label: tuple[np.ndarray, ...]  # for each label, the positions in this split of its images


@cache
def load_split(split: str) -> Digits:
    """The digits of a split.

    Of the images of each digit, those at positions 4, 9, 14, ... are "test" (355), those at 3, 8, 13, ... "val" (357),
    the others "train" (1,085).

    Raises:
        ImportError: scikit-learn is not installed.
        ValueError: there is no such split.
    """
    check_split(split)
    images, labels = load_digits()
    chosen = {"test": every_fifth(labels, 4), "val": every_fifth(labels, 3)}
    chosen["train"] = ~(chosen["test"] | chosen["val"])
    indices = np.flatnonzero(chosen[split])
    by_label = tuple(np.flatnonzero(labels[indices] == digit) for digit in range(10))
    return Digits(indices, images[indices], labels[indices], by_label)
