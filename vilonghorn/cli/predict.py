"""Prints a line with the most probable classes of each image.

An image that cannot be read is reported on standard error, the others are still classified, and the exit status is 1.
It is also 1 if images of a folder are left out because of their format.
"""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jsonargparse.typing import NonNegativeInt, PositiveInt
from tqdm import tqdm

from ..data.image_file import OTHER_IMAGES, describe_crop, image_sizes, printable
from ..data.image_folder import describe_left_out, list_images
from ..data.loaders.config import CROP_MODES
from ..inference import predict
from . import make_parser
from .arguments import add_max_pixels, add_model, load_model

parser = make_parser("predict", __doc__, "runs/photos holiday/ --top 3", "vim_tiny a.jpg b.jpg --json")
add_model(parser)
parser.add_argument("images", nargs="+", metavar="IMAGE", help="image file, or folder of images at any depth")
parser.add_argument("--top", type=PositiveInt, default=5, help="number of classes to print per image (default: 5)")
parser.add_argument("--batch-size", type=PositiveInt, default=32, help="images in a batch (default: 32)")
help = "processes that read images (default: 0, the main process reads)"
parser.add_argument("--workers", type=NonNegativeInt, default=0, help=help)
parser.add_argument("--json", action="store_true", help="print one JSON object per image and line (default: text)")
add_max_pixels(parser)
help = "what the model sees: center (a square from the middle), squash or border (default: as in evaluation)"
parser.add_argument("--crop-mode", choices=CROP_MODES, help=help)
help = "side of the crop, as a fraction of the largest that fits, above 0, at most 1 (default: as in evaluation)"
parser.add_argument("--crop-pct", type=float, help=help)


def find_images(names: Sequence[str]) -> tuple[list[str], Counter[str]]:
    """Replaces each folder by the images of `list_images`; one without images stays, so that `predict` reports it.

    Also returns, by extension, the number of files that are left out, which standard error names for each folder.
    """
    files, left_out = [], Counter[str]()
    for name in names:
        found, others = list_images(name) if Path(name).is_dir() else ([], Counter())
        if others:
            print(f"{printable(name)}: {describe_left_out(len(found), others)}", file=sys.stderr)
        files += found or [name]
        left_out += others
    return files, left_out


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 0, or 1 if an image could not be read or was left out."""
    options = parser.parse_args(argv)
    if options.crop_pct is not None and not 0 < options.crop_pct <= 1:
        parser.error(f"--crop-pct is {options.crop_pct}, expected a number above 0, at most 1")
    loaded, (files, left_out) = load_model(options), find_images(options.images)
    given = {name: value for name in ("crop_mode", "crop_pct") if (value := getattr(options, name)) is not None}
    loaded = replace(loaded, preprocessing=loaded.preprocessing | given)
    settings = {name: getattr(options, name) for name in ("top", "batch_size", "workers", "max_pixels")}
    crop = loaded.preprocessing
    if note := describe_crop(image_sizes(files) / crop["input_size"][:0:-1], crop["crop_pct"], crop["crop_mode"]):
        print(note.replace("crop_mode", "--crop-mode").replace("crop_pct", "--crop-pct"), file=sys.stderr)
    failed = bool(OTHER_IMAGES & left_out.keys())
    with tqdm(total=len(files), unit="img", disable=None if len(files) > 1 else True) as bar:
        for result in predict(loaded, files, **settings):
            if "error" in result:
                failed = True
                bar.write(f"error: {result['error']}", file=sys.stderr)
            if options.json:
                bar.write(json.dumps(result))
            elif "error" not in result:
                named = [f"{loaded.class_name(p['class'])} {p['probability']:.1%}" for p in result["predictions"]]
                bar.write(f"{printable(result['image'])}: {', '.join(named)}")
            bar.update()
    return 1 if failed else 0
