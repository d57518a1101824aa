"""Measures the weights of a run on held-out images: `vilonghorn evaluate RUN`."""

import argparse
import sys
from collections.abc import Sequence

from ..commands import make_parser
from ..engine import train


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command, also of its completion."""
    about = "Measure a run on its held-out images (data.val of its configuration), or on others by --data.val FOLDER. "
    parser = make_parser(
        "evaluate",
        about + "All options of `vilonghorn train` are allowed after RUN.",
        "runs/photos",
        "runs/photos --checkpoint last --data.val photos/test --data.batch_size 16",
    )
    parser.add_argument("run", metavar="RUN", help="directory of the run, as the first argument")
    parser.add_argument("--checkpoint", choices=["best", "last"], default="best", help="weights (default: %(default)s)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status, as `vilonghorn train`."""
    options, others = build_parser().parse_known_args(argv)
    return train.main(["--evaluate", options.run, "--checkpoint", options.checkpoint, *others])


if __name__ == "__main__":
    sys.exit(main())
