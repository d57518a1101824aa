"""Registers the models, then runs a script: `vilonghorn run train.py --model vilonghorn_tiny`.

For scripts that import timm only, such as timm's train.py. The script sees its own arguments and folder, as with
`python train.py`. Under torchrun: `torchrun --nproc-per-node 8 -m vilonghorn run train.py ...`.
"""

import argparse
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from .. import models  # noqa: F401  (registers the models)
from ..commands import make_parser


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command, also of its completion."""
    about = " ".join(__doc__.split("\n\n")[1].split())
    example = "train.py data/imagenet --model vilonghorn_tiny"
    parser = make_parser("run", f"Register the models, then run a script. {about}", example)
    parser.add_argument("script", metavar="SCRIPT", type=Path, help="a Python file, such as timm's train.py")
    parser.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="arguments of the script")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the script in `argv[0]` with the other arguments; returns the exit status."""
    parser = build_parser()
    options = parser.parse_args(argv)
    if not options.script.is_file():
        parser.error(f"there is no script {options.script}: expected a Python file, such as timm's train.py")
    sys.argv = [str(options.script), *options.arguments]
    sys.path.insert(0, str(options.script.resolve().parent))
    runpy.run_path(str(options.script), run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
