"""Measures a run on its held-out images (data.val of its configuration), or on others by --data.val FOLDER.

All options of `vilonghorn train` are allowed after RUN.
"""

from collections.abc import Sequence

from . import main as vilonghorn
from . import make_parser

parser = make_parser("evaluate", __doc__, "runs/photos", "runs/photos --checkpoint last --data.val photos/test")
parser.add_argument("run", metavar="RUN", help="directory of the run")
help = "weights (default: %(default)s)"
parser.add_argument("--checkpoint", choices=["best", "last"], default="best", help=help)


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit status, as `vilonghorn train`."""
    options, others = parser.parse_known_args(argv)
    return vilonghorn(["train", "--evaluate", options.run, "--checkpoint", options.checkpoint, *others])
