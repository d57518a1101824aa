"""Draws what a backbone does with an image.

KIND is attention (which patches the scans read), field (which pixels a patch depends on), pca (principal components of
the features) or cam (Grad-CAM of a class). The picture is one map over the image, or with --blocks one for each block.
"""

from collections.abc import Sequence
from pathlib import Path

from ..data.atomic_files import atomic_write
from ..data.image_file import explain_resize, read_image
from ..figures import png
from ..interpret import KINDS, draw, make_sheet, view
from . import make_parser
from .arguments import add_max_pixels, add_model, load_model

CAM = "runs/photos a.jpg --what cam --class cat --out cam.png"
parser = make_parser("interpret", __doc__, "runs/photos a.jpg --out maps.png", CAM)
add_model(parser)
parser.add_argument("image", metavar="IMAGE", help="image file")
parser.add_argument("--what", choices=KINDS, default="attention", metavar="KIND", help="default: attention")
parser.add_argument("--out", type=Path, required=True, metavar="FILE.png", help="picture to write")
help = "a map for each of these blocks; numbers from 0, -1 is the last (default: one map)"
parser.add_argument("--blocks", type=int, nargs="+", metavar="N", help=help)
help = "patch for attention (default: class token or mean) or field (default: the middle patch)"
parser.add_argument("--patch", type=int, nargs=2, metavar=("ROW", "COLUMN"), help=help)
help = "class of cam by name or number (default: most probable)"
parser.add_argument("--class", dest="target", metavar="NAME", help=help)
add_max_pixels(parser)


def main(argv: Sequence[str]) -> None:
    """Runs the command."""
    options = parser.parse_args(argv)
    out = options.out
    if out.suffix.lower() != ".png":
        raise ValueError(f"--out is {out}, expected a name that ends in .png")
    if not out.parent.is_dir():
        raise FileNotFoundError(f"--out is {out}, but there is no folder {out.parent}")
    if options.patch is not None and options.what not in ("attention", "field"):
        raise ValueError(f"--patch is for attention and field, not for --what {options.what}")
    if options.target is not None and options.what != "cam":
        raise ValueError(f"--class is for cam, not for --what {options.what}")
    picture, loaded = read_image(options.image, options.max_pixels), load_model(options)
    with explain_resize(options.image, picture):
        image = loaded.transform(picture)
    target = None if options.target is None else loaded.class_index(options.target)
    sheet = make_sheet(loaded, image, options.what, blocks=options.blocks, patch=options.patch, target=target)
    figure = draw(sheet, view(loaded, picture))
    with atomic_write(out) as file:
        file.write(png(figure))
    print(f"{out}: {sheet.title}; {', '.join(sheet.maps)} of {loaded.name}; {options.image}")
