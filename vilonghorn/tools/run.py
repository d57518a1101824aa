"""Registers the models, then runs a script: `python -m vilonghorn.tools.run train.py --model vilonghorn_tiny`.

For scripts that import timm only, such as timm's train.py. The script sees its own arguments and folder, as with
`python train.py`. Under torchrun: `torchrun --nproc-per-node 8 -m vilonghorn.tools.run train.py ...`.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import vilonghorn  # noqa: F401  (registers the models)

USAGE = "usage: python -m vilonghorn.tools.run SCRIPT [ARGUMENTS OF THE SCRIPT]"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the script in `argv[0]` with the other arguments; returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(f"{USAGE}\n\n{__doc__}", file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    script = Path(argv[0])
    if not script.is_file():
        print(f"{USAGE}\nthere is no script {script}: expected a Python file, such as timm's train.py", file=sys.stderr)
        return 2
    sys.argv = argv
    sys.path.insert(0, str(script.resolve().parent))
    runpy.run_path(str(script), run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
