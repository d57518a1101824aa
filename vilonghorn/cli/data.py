"""Writes scikit-learn's 1,797 handwritten digits as an image folder, every fifth of each class held out."""

from collections.abc import Sequence
from pathlib import Path

from ..data.digits import write_digits
from . import make_parser

parser = make_parser("data", __doc__, "digits data/digits")
parser.add_argument("dataset", choices=["digits"], help="needs scikit-learn, but no download")
parser.add_argument("target", metavar="DST", type=Path, help="the folder to make, with DST/train and DST/val")


def main(argv: Sequence[str]) -> None:
    """Runs the command."""
    target = parser.parse_args(argv).target
    written = write_digits(target)
    images = "10 classes, 1,442 training and 355 held-out images"
    print(f"{target}: {images if written else 'already complete, nothing written'}")
