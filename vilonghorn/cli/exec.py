"""Runs an unchanged script that imports timm or state-space packages, such as timm's train.py or a model of Mamba.

Before it, the models of this package are registered with timm, and `mamba_ssm`, `causal_conv1d` and the extensions of
VMamba are importable if they are not installed (`vilonghorn.compat`). The log names what else is changed without CUDA.
The script sees its own arguments and folder, as with `python train.py`. With torchrun:
`torchrun --nproc-per-node 8 -m vilonghorn exec train.py ...`.
"""

import argparse
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from .. import models  # noqa: F401  (registers the models)
from ..compat import install
from . import make_parser

parser = make_parser("exec", __doc__, "train.py data/imagenet --model vilonghorn_tiny")
parser.add_argument("script", metavar="SCRIPT", type=Path, help="a Python file, such as timm's train.py")
parser.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="arguments of the script")


def main(argv: Sequence[str]) -> None:
    """Runs the script in `argv[0]` with the other arguments. Its errors pass through."""
    options = parser.parse_args(argv)
    if not options.script.is_file():
        parser.error(f"there is no script {options.script}: expected a Python file, such as timm's train.py")
    sys.argv = [str(options.script), *options.arguments]
    sys.path.insert(0, str(options.script.resolve().parent))
    install(patches=True)  # what the folder of the script holds counts as installed
    runpy.run_path(str(options.script), run_name="__main__")
