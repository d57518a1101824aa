"""Measures a run on its held-out images (data.val of its configuration), or on others by --data.val FOLDER.

All options of `vilonghorn train` are allowed after RUN.
"""

from collections.abc import Sequence

from . import main as vilonghorn
from . import make_parser

EXAMPLES = "runs/photos --checkpoint last --data.val photos/test", "runs/photos --json scores.json --csv images.csv"
parser = make_parser("evaluate", __doc__, "runs/photos", *EXAMPLES)
parser.add_argument("run", metavar="RUN", help="directory of the run")
help = "weights (default: %(default)s)"
parser.add_argument("--checkpoint", choices=["best", "last"], default="best", help=help)
help = "write scores, the table of classes and the confusions to this file (default: none)"
parser.add_argument("--json", metavar="FILE", help=help)
parser.add_argument("--csv", metavar="FILE", help="write the prediction of each image to this file (default: none)")


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit status, as `vilonghorn train`."""
    options, others = parser.parse_known_args(argv)
    given = {name: value for name, value in vars(options).items() if name != "run" and value is not None}
    return vilonghorn(["train", f"--evaluate={options.run}", *(f"--{k}={v}" for k, v in given.items()), *others])
