"""Runs a script that imports timm only, with our models registered: `vilonghorn run train.py --model vim_tiny`."""

import argparse
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from .. import models  # noqa: F401  (registers the models)
from . import make_parser


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command, also of its completion."""
    about = "Register the models, then run a script that imports timm only, such as timm's train.py. The script sees "
    about += "its own arguments and folder, as with `python train.py`. With torchrun: `torchrun --nproc-per-node 8 -m "
    about += "vilonghorn run train.py ...`."
    parser = make_parser("run", about, "train.py data/imagenet --model vilonghorn_tiny")
    parser.add_argument("script", metavar="SCRIPT", type=Path, help="a Python file, such as timm's train.py")
    parser.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="arguments of the script")
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs the script in `argv[0]` with the other arguments; returns 0, or lets the script's error pass."""
    parser = build_parser()
    options = parser.parse_args(argv)
    if not options.script.is_file():
        parser.error(f"there is no script {options.script}: expected a Python file, such as timm's train.py")
    sys.argv = [str(options.script), *options.arguments]
    sys.path.insert(0, str(options.script.resolve().parent))
    runpy.run_path(str(options.script), run_name="__main__")
    return 0
