"""Real images that come with installed packages, written out as image folders: a task to train on with no download.

`python -m vilonghorn.data.digits digits DST` writes scikit-learn's handwritten digits.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from .files import sync_folder

SIDE = 32  # pixels, bicubic from 8: a model with patch 4 sees 64 tokens
HOLD_OUT = 5  # every fifth image of a class, by its position in scikit-learn's order, is held out


def write_digits(target: str | os.PathLike) -> bool:
    """Writes scikit-learn's 1,797 handwritten digits (UCI optdigits' test set) as `target/{train,val}/{0..9}/NNNN.png`.

    NNNN is the position in `sklearn.datasets.load_digits`. The split is fixed and stratified: of the images of a digit
    in that order, those at positions 4, 9, 14, ... are in `val` (355), the others in `train` (1,442).

    Args:
        target: the folder to make. A complete one is left as it is.

    Returns:
        Whether anything was written.

    Raises:
        FileExistsError: `target` is there and is not this dataset.
        FileNotFoundError: the folder of `target` does not exist.
        ImportError: scikit-learn is not installed.
    """
    target = Path(target)
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("the embedded digits come with scikit-learn; run: pip install scikit-learn") from error
    digits = load_digits()
    names = _digit_names(digits.target)
    if target.exists():
        if target.is_dir() and {p.relative_to(target).as_posix() for p in target.rglob("*.*")} == set(names):
            return False
        raise FileExistsError(f"{target}: exists and is not the whole set of digits; remove it or give another name")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{target.parent}: no such folder to write {target.name} into; make it first")
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        for name, pixels in zip(names, digits.images):
            file = partial / name
            file.parent.mkdir(parents=True, exist_ok=True)
            small = Image.fromarray(np.rint(pixels * (255 / 16)).astype(np.uint8))
            small.resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(file)
        if hasattr(os, "sync"):
            os.sync()
        os.rename(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    sync_folder(target.parent)
    return True


def held_out(labels: np.ndarray) -> np.ndarray:
    """Which of the digits, in scikit-learn's order, are held out: (n,) bool."""
    chosen = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        chosen[np.nonzero(labels == label)[0][HOLD_OUT - 1 :: HOLD_OUT]] = True
    return chosen


def _digit_names(labels: np.ndarray) -> list[str]:
    splits = np.where(held_out(labels), "val", "train")
    return [f"{split}/{label}/{index:04d}.png" for index, (split, label) in enumerate(zip(splits, labels))]


DATASETS = {"digits": write_digits}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: the command line without the program's name; default that of the process.

    Returns:
        The exit status: 0, or 1 for a target that cannot be used.
    """
    parser = argparse.ArgumentParser(prog="python -m vilonghorn.data.digits", description=__doc__.split("\n")[0])
    parser.add_argument("dataset", choices=sorted(DATASETS))
    parser.add_argument("target", metavar="DST", help="the folder to make")
    options = parser.parse_args(arguments)
    try:
        written = DATASETS[options.dataset](options.target)
    except (OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{options.target}: {options.dataset} {'written' if written else 'already complete, nothing written'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
