"""The command line of `.beton` files: `python -m vilonghorn.data.beton SRC DST` writes one, `--check PATH` reads it.

What it does is in `beton_writer` and `beton_format`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ..imagenet import flat_images
from .format import BetonError, check_beton, manifest_path
from .writer import write_beton

__all__ = ["BetonError", "check_beton", "main", "write_beton"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: the command line without the program's name; default that of the process.

    Returns:
        The exit status: 0, 1 for input that cannot be used, 130 after an interrupt.
    """
    parser = argparse.ArgumentParser(
        prog="python -m vilonghorn.data.beton",
        description="Write an image folder (SRC/class/image) to a .beton file, or check one.",
    )
    parser.add_argument("source", nargs="?", metavar="SRC", help="folder with one folder of images for each class")
    parser.add_argument("target", nargs="?", metavar="DST", help="the .beton file to write")
    parser.add_argument("--check", metavar="PATH", help="check this .beton, all image data included, and write nothing")
    parser.add_argument(
        "--labels",
        metavar="PATH",
        help="SRC is ImageNet's flat validation folder; its classes are told by this folder of the devkit "
        "(ILSVRC2012_devkit_t12, with data/ILSVRC2012_validation_ground_truth.txt and data/meta.mat or "
        "data/synsets.txt) or table of images and classes (LOC_val_solution.csv)",
    )
    parser.add_argument("--mode", default="raw", help="raw, jpg, or proportion of jpg (default: raw)")
    parser.add_argument("--max-resolution", type=int, default=500, help="shrink longer sides to this (default: 500)")
    parser.add_argument("--jpeg-quality", type=int, default=90, help="1 to 100 (default: 90)")
    parser.add_argument(
        "--compress-probability", type=float, default=0.5, help="share of JPEG in mode proportion (default: 0.5)"
    )
    parser.add_argument("--workers", type=int, help="encoding threads (default: one for each CPU)")
    parser.add_argument(
        "--skip-unreadable", action="store_true", help="leave out images that cannot be decoded; list them in DST.json"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing DST")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    options = parser.parse_args(arguments)
    if (options.check is None) != (options.source is not None and options.target is not None):
        parser.error("give either SRC and DST, or --check PATH")
    try:
        if options.check is not None:
            beton = check_beton(options.check)
            with_images = manifest_path(beton.path).exists()
            if with_images:
                check_beton(options.check, images=True)
            note = "tables and image data" if with_images else "tables only, for want of a manifest"
        else:
            source = flat_images(options.source, options.labels) if options.labels is not None else options.source
            beton = write_beton(
                source,
                options.target,
                mode=options.mode,
                max_resolution=options.max_resolution,
                jpeg_quality=options.jpeg_quality,
                compress_probability=options.compress_probability,
                workers=options.workers,
                skip_unreadable=options.skip_unreadable,
                overwrite=options.overwrite,
                progress=not options.quiet,
            )
            note = "written and checked" + _oddities(manifest_path(beton.path))
    except (ImportError, OSError, TypeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        return 130
    size = beton.path.stat().st_size / 1e6
    print(f"{beton.path}: {beton.num_samples} images, {beton.num_classes} classes, {size:.1f} MB: {note}")
    return 0


def _oddities(manifest: Path) -> str:
    """What the writer converted and left out, in a few words."""
    written = json.loads(manifest.read_text(encoding="utf-8"))
    converted = ", ".join(f"{found['count']} {kind}" for kind, found in written["converted"].items())
    left_out = len(written["left_out"])
    for reason in written["left_out"]:
        print(f"left out: {reason}", file=sys.stderr)
    words = [f"converted {converted}"] * bool(converted) + [f"left out {left_out}"] * bool(left_out)
    return "".join(f"; {word}" for word in words) + f" (listed in {manifest.name})" * bool(words)


if __name__ == "__main__":
    sys.exit(main())
