"""Draws what a backbone does with an image: `python -m vilonghorn.interpret MODEL IMAGE --what KIND --out FILE`.

KIND is attention (which tokens the scan reads a token's output from), field (which pixels a token depends on), memory
(how long the state remembers a token), pca (principal components of the features) or cam (Grad-CAM of a class). The
functions that compute them can be imported from here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ..data.images import read_image
from ..engine.report import save_figure
from ..tools import loaded_model as subject
from .draw import KINDS, draw, make_sheet
from .model import attention, grad_cam, memory, pca, receptive_field, reshape_transform, scans
from .scan import ScanInputs, attention_rows, half_life, retention, scan_inputs
from .tokens import grid_of, patch_token, scan_position, to_map

__all__ = [
    "ScanInputs",
    "attention",
    "attention_rows",
    "draw",
    "grad_cam",
    "grid_of",
    "half_life",
    "make_sheet",
    "memory",
    "patch_token",
    "pca",
    "receptive_field",
    "reshape_transform",
    "retention",
    "scan_inputs",
    "scan_position",
    "scans",
    "to_map",
]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, or 2 for what cannot be drawn."""
    parser = argparse.ArgumentParser(prog="python -m vilonghorn.interpret", description=__doc__.split("\n\n")[1])
    subject.arguments(parser)
    parser.add_argument("image", metavar="IMAGE", help="image file")
    parser.add_argument("--what", choices=KINDS, default="attention", help="default: attention")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.png", help="the picture to write")
    parser.add_argument(
        "--blocks", type=int, nargs="+", metavar="N", help="blocks to show, from 0, or from -1 at the end"
    )
    parser.add_argument(
        "--patch",
        type=_patch,
        metavar="ROW,COLUMN",
        help="patch whose attention or field is drawn (default: the class token's attention, the middle patch's field)",
    )
    parser.add_argument(
        "--class", dest="target", type=int, metavar="N", help="class that cam explains (default: the likeliest)"
    )
    options = parser.parse_args(argv)
    try:
        if options.out.suffix.lower() != ".png":
            raise ValueError(f"{options.out}: the picture is a PNG, so its name ends in .png")
        if not options.out.parent.is_dir():
            raise FileNotFoundError(f"{options.out.parent}: no such folder to write {options.out.name} into")
        picture = read_image(options.image)
        found = subject.from_options(options)
        image = found.transform(picture)
        sheet = make_sheet(
            found, image, options.what, blocks=options.blocks, patch=options.patch, target=options.target
        )
        save_figure(options.out, draw(sheet, found.picture(image)))
    except (*subject.FAILURES, TypeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    blocks = ", ".join(map(str, sheet.blocks))
    print(f"{options.out}: {sheet.title}; blocks {blocks} of {found.name}; {options.image}")
    return 0


def _patch(text: str) -> tuple[int, int]:
    try:
        row, column = map(int, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ROW,COLUMN, such as 3,4") from None
    return row, column


if __name__ == "__main__":
    sys.exit(main())
