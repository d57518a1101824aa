"""Command line: `vilonghorn beton SRC DST` writes a `.beton` file, `--check PATH` checks one."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ...commands import make_parser
from ..imagenet import flat_images
from .format import check_beton, manifest_path
from .writer import write_beton


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command, also of its completion."""
    about = "Write an image folder (SRC/class/image) to a .beton file, which FFCV reads quickly, or check one."
    parser = make_parser("beton", about, "photos/train photos/train.beton", "--check photos/train.beton")
    parser.add_argument("source", nargs="?", metavar="SRC", help="folder with one folder of images for each class")
    parser.add_argument("target", nargs="?", metavar="DST", help="the .beton file to write")
    parser.add_argument("--check", metavar="PATH", help="check this .beton, all image data included, and write nothing")
    parser.add_argument(
        "--labels",
        metavar="PATH",
        help="SRC is ImageNet's flat validation folder; this folder of the devkit (ILSVRC2012_devkit_t12, with "
        "data/ILSVRC2012_validation_ground_truth.txt and data/meta.mat or data/synsets.txt) or this table of images "
        "and classes (LOC_val_solution.csv) gives its classes",
    )
    parser.add_argument(
        "--mode", help="how images are stored: raw (pixels), jpg, or proportion (some as JPEG) (default: %(default)s)"
    )
    parser.add_argument(
        "--max-resolution", type=int, help="longest side in pixels; larger images are shrunk (default: %(default)s)"
    )
    parser.add_argument(
        "--max-pixels",
        type=int,
        help="refuse image files of more pixels (width times height), which fill the memory (default: %(default)s)",
    )
    parser.add_argument("--jpeg-quality", type=int, help="1 (smallest file) to 100 (best image) (default: %(default)s)")
    parser.add_argument(
        "--compress-probability",
        type=float,
        help="fraction of images stored as JPEG in mode proportion (default: %(default)s)",
    )
    parser.add_argument("--workers", type=int, help="encoding threads (default: one for each CPU)")
    parser.add_argument(
        "--skip-unreadable",
        action="store_true",
        help="leave out images that cannot be decoded, and list them in DST.json (default: stop at the first)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing DST")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    shared = ("mode", "max_resolution", "max_pixels", "jpeg_quality", "compress_probability")
    parser.set_defaults(**{name: write_beton.__kwdefaults__[name] for name in shared})
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns the exit status: 0, 1 for input that cannot be used, 130 after an interrupt."""
    parser = build_parser()
    options = vars(parser.parse_args(arguments))
    check, source, target, labels, quiet = map(options.pop, ("check", "source", "target", "labels", "quiet"))
    if (check is None) != (source is not None and target is not None):
        parser.error("give either SRC and DST, or --check PATH")
    try:
        if check is not None:
            complete = manifest_path(Path(check)).exists()
            beton = check_beton(check, images=complete)
            note = "tables and image data" if complete else "tables only, because there is no manifest"
        else:
            source = flat_images(source, labels, options["max_pixels"]) if labels is not None else source
            beton = write_beton(source, target, progress=not quiet, **options)
            note = _summary(manifest_path(beton.path))
    except (ImportError, OSError, TypeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        return 130
    size = beton.path.stat().st_size / 1e6
    print(f"{beton.path}: {beton.num_samples} images, {beton.num_classes} classes, {size:.1f} MB: {note}")
    return 0


def _summary(manifest: Path) -> str:
    """What the writer converted and left out, in a few words; the reasons go to stderr."""
    written = json.loads(manifest.read_text(encoding="utf-8"))
    for reason in written["left_out"]:
        print(f"left out: {reason}", file=sys.stderr)
    converted = ", ".join(f"{found['count']} {kind}" for kind, found in written["converted"].items())
    counts = {"converted": converted, "left out": len(written["left_out"])}
    words = [f"; {what} {count}" for what, count in counts.items() if count]
    return "written and checked" + "".join(words) + f" (listed in {manifest.name})" * bool(words)


if __name__ == "__main__":
    sys.exit(main())
