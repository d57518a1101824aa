"""Writes an image folder (SRC/class/image) to a .beton file, which FFCV reads quickly, or checks one."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ..data.beton.format import check_beton, manifest_path
from ..data.beton.writer import write_beton
from ..data.imagenet import flat_images
from . import make_parser
from .arguments import add_max_pixels

OPTIONS = ("mode", "max_resolution", "jpeg_quality", "compress_probability", "workers", "skip_unreadable", "overwrite")

parser = make_parser("beton", __doc__, "photos/train photos/train.beton", "--check photos/train.beton")
add = parser.add_argument
add("source", nargs="?", metavar="SRC", help="folder with one folder of images for each class")
add("target", nargs="?", metavar="DST", help="the .beton file to write")
add("--check", metavar="PATH", help="check this .beton, all image data included, and write nothing")
help = "SRC is ImageNet's flat validation folder, and PATH has its classes: the folder of the devkit "
help += "(ILSVRC2012_devkit_t12, with data/ILSVRC2012_validation_ground_truth.txt and data/meta.mat or "
help += "data/synsets.txt), or the table LOC_val_solution.csv"
add("--labels", metavar="PATH", help=help)
add("--mode", help="how images are stored: raw (pixels), jpg, or proportion (some as JPEG) (default: %(default)s)")
help = "longest side in pixels; larger images are shrunk (default: %(default)s)"
add("--max-resolution", type=int, help=help)
add_max_pixels(parser)
add("--jpeg-quality", type=int, help="1 (smallest file) to 100 (best image) (default: %(default)s)")
help = "fraction of images stored as JPEG in mode proportion (default: %(default)s)"
add("--compress-probability", type=float, help=help)
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
        pixels = options.max_pixels
        source = source if options.labels is None else flat_images(source, options.labels, pixels)
        chosen = {name: getattr(options, name) for name in OPTIONS}
        beton = write_beton(source, target, max_pixels=pixels, progress=not options.quiet, **chosen)
        note = _summary(manifest_path(beton.path))
    size = beton.path.stat().st_size / 1e6
    print(f"{beton.path}: {beton.num_samples} images, {beton.num_classes} classes, {size:.1f} MB: {note}")


def _summary(manifest: Path) -> str:
    """What the writer converted and left out, in a few words; the reasons go to stderr."""
    written = json.loads(manifest.read_text(encoding="utf-8"))
    for reason in written["left_out"]:
        print(f"left out: {reason}", file=sys.stderr)
    converted = ", ".join(f"{found['count']} {kind}" for kind, found in written["converted"].items())
    counts = {"converted": converted, "left out": len(written["left_out"])}
    words = [f"; {what} {count}" for what, count in counts.items() if count]
    return "written and checked" + "".join(words) + f" (listed in {manifest.name})" * bool(words)
