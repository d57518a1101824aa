"""Measures the weights of a run on held-out images: `vilonghorn evaluate RUN`."""

import argparse
from collections.abc import Sequence

from . import main as vilonghorn
from . import make_parser
from .arguments import add_run


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command, also of its completion."""
    about = "Measure a run on its held-out images (data.val of its configuration), or on others by --data.val FOLDER. "
    about += "All options of `vilonghorn train` are allowed after RUN."
    parser = make_parser("evaluate", about, "runs/photos", "runs/photos --checkpoint last --data.val photos/test")
    add_run(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit status, as `vilonghorn train`."""
    options, others = build_parser().parse_known_args(argv)
    return vilonghorn(["train", "--evaluate", options.run, "--checkpoint", options.checkpoint, *others])
