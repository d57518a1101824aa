"""Registers the models, then runs a script: `python -m vilonghorn.tools.run train.py --model vilonghorn_tiny`.

For scripts that import timm only, such as timm's train.py. The script sees its own arguments and folder, as with
`python train.py`. Under torchrun: `torchrun --nproc-per-node 8 -m vilonghorn.tools.run train.py ...`.
"""

import argparse
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import vilonghorn  # noqa: F401  (registers the models)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the script in `argv[0]` with the other arguments; returns the exit status."""
    parser = argparse.ArgumentParser("python -m vilonghorn.tools.run", description=__doc__)
    parser.add_argument("script", metavar="SCRIPT", type=Path, help="a Python file, such as timm's train.py")
    parser.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="arguments of the script")
    options = parser.parse_args(argv)
    if not options.script.is_file():
        parser.error(f"there is no script {options.script}")
    sys.argv = [str(options.script), *options.arguments]
    sys.path.insert(0, str(options.script.resolve().parent))
    runpy.run_path(str(options.script), run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
