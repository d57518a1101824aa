"""scikit-learn's 1,797 handwritten digits as an image folder, to train on without a download."""

import os
from pathlib import Path

import numpy as np
from PIL import Image

from .atomic_files import atomic_folder

SIDE = 32  # pixels of a written image; a model with patch size 4 sees 64 tokens


def load_digits() -> tuple[np.ndarray, np.ndarray]:
    """The digits of scikit-learn, UCI optdigits' test set, in its order.

    Returns images (1797, 8, 8) uint8 of 17 grey levels, 0 is the background and 255 full ink; labels (1797,) int64.
    """
    from sklearn import datasets  # slow to import

    digits = datasets.load_digits()
    return np.rint(digits.images * (255 / 16)).astype(np.uint8), digits.target.astype(np.int64)


def every_fifth(labels: np.ndarray, start: int) -> np.ndarray:
    """(n,) bool, the samples at positions `start`, `start` + 5, ... among those of their class, in their order."""
    chosen = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        chosen[np.flatnonzero(labels == label)[start::5]] = True
    return chosen


def write_digits(target: str | os.PathLike) -> bool:
    """Writes the digits as `target/{train,val}/{0..9}/NNNN.png`, 32 x 32 pixels, unless they are there already.

    NNNN is the position in `sklearn.datasets.load_digits`. Every fifth of each digit is in `val` (355), the others in
    `train` (1,442). Returns whether anything was written. Raises FileExistsError if `target` has another content.
    """
    target, (images, labels) = Path(target), load_digits()
    splits = np.where(every_fifth(labels, 4), "val", "train")
    files = {f"{splits[i]}/{label}/{i:04d}.png": images[i] for i, label in enumerate(labels)}
    if target.exists():
        if target.is_dir() and {p.relative_to(target).as_posix() for p in target.rglob("*.*")} == files.keys():
            return False
        raise FileExistsError(f"{target}: exists and is not the complete set of digits; remove it or give another name")
    with atomic_folder(target) as partial:
        for name, image in files.items():
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(partial / name)
    return True
