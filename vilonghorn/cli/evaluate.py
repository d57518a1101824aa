"""Measures a run on its held-out images (data.val of its configuration), or on others by --data.val FOLDER.

All options of `vilonghorn train` are allowed after RUN.
"""

from collections.abc import Sequence

from . import main as vilonghorn
from . import make_parser
from .arguments import add_run

parser = make_parser("evaluate", __doc__, "runs/photos", "runs/photos --checkpoint last --data.val photos/test")
add_run(parser)
help = "classify its frozen features instead: logistic regression and nearest neighbours, learned from data.train"
parser.add_argument("--probe", action="store_true", help=help)


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit status, as `vilonghorn train`."""
    options, others = parser.parse_known_args(argv)
    probe = ["--probe"] * options.probe
    return vilonghorn(["train", "--evaluate", options.run, "--checkpoint", options.checkpoint, *probe, *others])
