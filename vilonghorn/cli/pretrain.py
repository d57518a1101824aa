"""Learns from images without labels, for `vilonghorn train --model.weights` to start from.

Parts of each image are masked, and the model learns to reconstruct them (SimMIM). It is `vilonghorn train` with the
configuration `pretrain`, and takes its options. The images of data.train and data.val need no labels.
--task.mask_ratio is the masked part of an image, --task.mask_unit the side of a masked square.
"""

from collections.abc import Sequence

from . import main as vilonghorn
from . import make_parser

START = "--data.train photos/all --data.val photos/val"
SMALL = f"{START} --model.name vilonghorn_tiny --model.weights null"
parser = make_parser("pretrain", __doc__, START, SMALL, "--resume runs/pretrained")
parser.add_argument("--resume", metavar="RUN", help="resume the run in this directory (default: start one)")


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit status, as `vilonghorn train`."""
    options, others = parser.parse_known_args(argv)
    start = ["--config", "pretrain"] if options.resume is None else ["--resume", options.resume]
    return vilonghorn(["train", *start, *others])
