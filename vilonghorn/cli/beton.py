"""Writes images to a .beton file, which FFCV reads quickly, or checks one."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ..data.beton.format import check_beton, manifest_path
from ..data.beton.writer import write_beton
from ..data.image_file import printable
from . import make_parser
from .arguments import add_max_pixels

OPTIONS = ("mode", "max_resolution", "jpeg_quality", "workers", "skip_unreadable", "overwrite")

examples = ("photos/train photos/train.beton", "hf:cifar10:train cifar10-train.beton", "--check photos/train.beton")
parser = make_parser("beton", __doc__, *examples)
add = parser.add_argument
help = "a folder with one folder of images for each class, hf:NAME:SPLIT of the Hugging Face Hub or a folder, or tar "
help += "files of WebDataset; then the .beton file to write"
add("paths", nargs="*", metavar="SRC ... DST", help=help)
add("--check", metavar="PATH", help="check this .beton, all image data included, and write nothing")
add("--mode", help="how images are stored: raw (pixels) or jpg (default: %(default)s)")
help = "longest side in pixels; larger images are shrunk (default: %(default)s)"
add("--max-resolution", type=int, help=help)
add_max_pixels(parser)
add("--classes", metavar="FILE", help="names of the classes, a line each, from label 0 (default: those of SRC)")
add("--jpeg-quality", type=int, help="1 (smallest file) to 100 (best image) (default: %(default)s)")
add("--workers", type=int, help="encoding threads (default: one for each CPU)")
help = "leave out images that cannot be decoded or lack a label, and list them in DST.json (default: stop at the first)"
add("--skip-unreadable", action="store_true", help=help)
add("--overwrite", action="store_true", help="replace an existing DST")
add("--quiet", action="store_true", help="no progress bar")
# The defaults are those of the function.
parser.set_defaults(**{name: write_beton.__kwdefaults__[name] for name in OPTIONS})


def main(argv: Sequence[str]) -> None:
    """Runs the command."""
    options = parser.parse_args(argv)
    check, (*sources, target) = options.check, options.paths or [None]
    many = len(sources) > 1 and not all(source.endswith(".tar") for source in sources)
    if (check is None) == (not sources) or (check and target) or many:
        parser.error("give either SRC and DST, or --check PATH; several SRC are tar files")
    if check is not None:
        complete = manifest_path(Path(check)).exists()
        beton = check_beton(check, images=complete)
        note = "tables and image data" if complete else "tables only, because there is no manifest"
    else:
        chosen = {name: getattr(options, name) for name in OPTIONS}
        chosen |= {"max_pixels": options.max_pixels, "progress": not options.quiet}
        if options.classes is not None:
            chosen["classes"] = read_names(Path(options.classes))
        beton = write_beton("::".join(sources), target, **chosen)
        manifest = manifest_path(beton.path)
        left_out = json.loads(manifest.read_text(encoding="utf-8"))["left_out"]
        for reason in left_out[:10]:  # DST.json has all
            print(f"left out: {reason}", file=sys.stderr)
        note = "written and checked" + f"; left out {len(left_out)} (listed in {manifest.name})" * bool(left_out)
    size = beton.path.stat().st_size / 1e6
    print(f"{beton.path}: {beton.num_samples} images, {beton.num_classes} classes, {size:.1f} MB: {note}")


def read_names(file: Path) -> list[str]:
    """The names in a file of --classes. Raises FileNotFoundError, or ValueError if a line is not a printable name."""
    if not file.is_file():
        raise FileNotFoundError(f"--classes is {file}, but there is no such file")
    try:
        names = file.read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"--classes is {file}, which is not UTF-8 ({error}): save it so") from None
    if wrong := [number for number, name in enumerate(names, 1) if not name or name != printable(name.strip())]:
        raise ValueError(f"--classes is {file}, whose line {wrong[0]} is no name: expected printable text")
    return names
