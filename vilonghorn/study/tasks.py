"""Tasks made of real handwritten digits, to compare what models can do: each is written as three `.beton` files.

`python -m vilonghorn.study.tasks digits DST` and `python -m vilonghorn.study.tasks recall DST --pairs 8 --grid 6` write
DST/{train,val,test}.beton. The digits of the three come from disjoint originals (see `specimens`), and sample i of a
split depends only on the seed, the split and i.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ..data.beton.writer import write_beton
from ..data.specimens import SPLITS, enlarged, specimens
from .recall import Recall

__all__ = ["Digits", "KINDS", "Recall", "make_task", "write_task"]


@dataclass(frozen=True)
class Digits:
    """Which digit is this? Every original of a split once, in colourless pixels.

    Written at several sides, it is the task of resolution transfer: the same digits in more patches.

    Args:
        split: "train", "val" or "test".
        side: height and width in pixels, bicubic from 8.
    """

    split: str
    side: int = 32

    def __post_init__(self):
        specimens(self.split)
        if self.side < 2:
            raise ValueError(f"side {self.side}: expected at least 2 pixels")

    @property
    def classes(self) -> list[str]:
        return [str(digit) for digit in range(10)]

    @property
    def chance(self) -> float:
        """Accuracy of a guess."""
        return 0.1

    def __len__(self) -> int:
        return len(specimens(self.split).labels)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        digits = specimens(self.split)
        return enlarged(digits.images[index], self.side), int(digits.labels[index])


KINDS = {"digits": Digits, "recall": Recall}


def make_task(kind: str, split: str, **options: Any) -> Digits | Recall:
    """A split of a task as a map-style dataset of (image, label).

    Args:
        kind: "digits" or "recall".
        split: "train", "val" or "test".
        options: of `Digits` or `Recall`.

    Raises:
        TypeError, ValueError: an unknown kind, or an option that it does not have or is out of range.
    """
    if kind not in KINDS:
        raise ValueError(f"task {kind!r}: expected one of {', '.join(KINDS)}")
    return KINDS[kind](split, **options)


def write_task(dataset: Digits | Recall, path: Path, *, overwrite: bool = False) -> None:
    """Writes a split of a task as a `.beton` of raw pixels. Its folder exists; `write_beton` says what can go wrong."""
    write_beton(dataset, path, max_resolution=max(500, dataset.side), workers=1, overwrite=overwrite, progress=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status: 0, or 1 for a task that cannot be made or written."""
    parser = argparse.ArgumentParser(prog="python -m vilonghorn.study.tasks", description=__doc__.split("\n")[0])
    kinds = parser.add_subparsers(dest="kind", required=True)
    digits, recall = (kinds.add_parser(kind, help=task.__doc__.split("\n")[0]) for kind, task in KINDS.items())
    digits.add_argument("--side", type=int, default=32, help="pixels (default: 32)")
    for option, default, text in (
        ("pairs", 4, "pairs of key and value in a mosaic"),
        ("grid", 4, "tiles of 8 pixels a side, even"),
        ("colours", 2, "colours of keys, of which there are ten times as many"),
        ("queries", 1, "keys that are asked for; the label has as many digits"),
        ("seed", 0, "of the mosaics"),
        *((split, 1024, f"mosaics to {use}") for split, use in zip(SPLITS, ("train on", "choose by", "test on"))),
    ):
        recall.add_argument(f"--{option}", type=int, default=default, help=f"{text} (default: {default})")
    recall.add_argument("--distractors", action="store_true", help="fill the other tiles with digits that mean nothing")
    recall.add_argument("--same-original", action="store_true", help="ask by the picture of the key itself")
    for sub in (digits, recall):
        sub.add_argument("target", metavar="DST", type=Path, help="folder to write train, val and test.beton into")
        sub.add_argument("--overwrite", action="store_true", help="replace files that are there")
    options = vars(parser.parse_args(arguments))
    kind, target, overwrite = (options.pop(name) for name in ("kind", "target", "overwrite"))
    counts = {split: {"count": options.pop(split)} if split in options else {} for split in SPLITS}
    try:
        datasets = [make_task(kind, split, **options, **counts[split]) for split in SPLITS]
        target.mkdir(parents=True, exist_ok=True)
        for dataset in datasets:
            write_task(dataset, target / f"{dataset.split}.beton", overwrite=overwrite)
            told = ", ".join(f"{name} {value}" for name, value in asdict(dataset).items() if name != "split")
            print(f"{target}/{dataset.split}.beton: {kind}, {len(dataset)} images, {told}, chance {dataset.chance:.1%}")
    except (OSError, TypeError, ValueError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
