"""Writes an image folder (SRC/class/image) to a .beton file, which FFCV reads quickly, or checks one."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ..data.beton.format import check_beton, manifest_path
from ..data.beton.writer import write_beton
from . import make_parser
from .arguments import add_max_pixels

OPTIONS = ("mode", "max_resolution", "jpeg_quality", "workers", "skip_unreadable", "overwrite")

parser = make_parser("beton", __doc__, "photos/train photos/train.beton", "--check photos/train.beton")
add = parser.add_argument
add("source", nargs="?", metavar="SRC", help="folder with one folder of images for each class")
add("target", nargs="?", metavar="DST", help="the .beton file to write")
add("--check", metavar="PATH", help="check this .beton, all image data included, and write nothing")
add("--mode", help="how images are stored: raw (pixels) or jpg (default: %(default)s)")
help = "longest side in pixels; larger images are shrunk (default: %(default)s)"
add("--max-resolution", type=int, help=help)
add_max_pixels(parser)
add("--jpeg-quality", type=int, help="1 (smallest file) to 100 (best image) (default: %(default)s)")
add("--workers", type=int, help="encoding threads (default: one for each CPU)")
help = "leave out images that cannot be decoded, and list them in DST.json (default: stop at the first)"
add("--skip-unreadable", action="store_true", help=help)
add("--overwrite", action="store_true", help="replace an existing DST")
add("--quiet", action="store_true", help="no progress bar")
# The defaults are those of the function.
parser.set_defaults(**{name: write_beton.__kwdefaults__[name] for name in OPTIONS})


def main(argv: Sequence[str]) -> None:
    """Runs the command."""
    options = parser.parse_args(argv)
    check, source, target = options.check, options.source, options.target
    if (check is None) != (source is not None and target is not None):
        parser.error("give either SRC and DST, or --check PATH")
    if check is not None:
        complete = manifest_path(Path(check)).exists()
        beton = check_beton(check, images=complete)
        note = "tables and image data" if complete else "tables only, because there is no manifest"
    else:
        chosen = {name: getattr(options, name) for name in OPTIONS}
        beton = write_beton(source, target, max_pixels=options.max_pixels, progress=not options.quiet, **chosen)
        manifest = manifest_path(beton.path)
        left_out = json.loads(manifest.read_text(encoding="utf-8"))["left_out"]
        for reason in left_out:
            print(f"left out: {reason}", file=sys.stderr)
        note = "written and checked" + f"; left out {len(left_out)} (listed in {manifest.name})" * bool(left_out)
    size = beton.path.stat().st_size / 1e6
    print(f"{beton.path}: {beton.num_samples} images, {beton.num_classes} classes, {size:.1f} MB: {note}")
