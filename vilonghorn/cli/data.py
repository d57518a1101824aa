"""Makes image folders: scikit-learn's digits, or a training and a held-out part of a folder.

`digits DST` writes scikit-learn's 1,797 handwritten digits, every fifth of each class held out. `split SRC DST` copies
the images of a folder into DST/train and DST/val. All images are opened first; equal ones come into the same part.
"""

import argparse
import os
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path

from jsonargparse.typing import NonNegativeInt, OpenUnitInterval

from ..data.atomic_files import atomic_folder
from ..data.digits import write_digits
from ..engine.config import Config, DataConfig, RunConfig, check
from ..engine.loaders import open_data
from . import make_parser

parser = make_parser("data", __doc__, "digits data/digits", "split pictures photos --fraction 0.2")
commands = parser.add_subparsers(dest="command", required=True, metavar="digits|split")
digits = commands.add_parser("digits", help="write scikit-learn's digits, without a download")
split = commands.add_parser("split", help="copy a folder into a training and a held-out part")
split.add_argument("source", metavar="SRC", help="a folder with one folder of images for each class")
help = "part of the images of each class that is held out, above 0 and below 1 (default: %(default)s)"
split.add_argument("--fraction", type=OpenUnitInterval, default=0.2, help=help)
split.add_argument("--seed", type=NonNegativeInt, default=0, help="of the random choice (default: %(default)s)")
split.add_argument("--skip-unreadable", action="store_true", help="leave out images that cannot be read, and list them")
for command in (digits, split):
    command.add_argument("target", metavar="DST", type=Path, help="the folder to make, with DST/train and DST/val")


def main(argv: Sequence[str]) -> None:
    """Runs the command."""
    options = parser.parse_args(argv)
    target = options.target
    if options.command == "split":
        split_folder(options.source, target, options)
    elif write_digits(target):
        print(f"{target}: 10 classes, 1,442 training and 355 held-out images")
    else:
        print(f"{target}: already complete, nothing written")


def split_folder(source: str, target: Path, options: argparse.Namespace) -> None:
    """Copies the images of a folder into `target`/train and `target`/val, split as by `data.val_split`."""
    data = DataConfig(train=source, val_split=options.fraction, skip_unreadable=options.skip_unreadable)
    config = Config(data=data, run=RunConfig(seed=options.seed))
    check(config)
    if target.resolve().is_relative_to(Path(source).resolve()):
        raise ValueError(f"{target} is in {source}, whose classes it would become: give a folder beside it")
    with atomic_folder(target) as partial:
        parts = open_data(config)
        for note in parts["train"].notes:
            warnings.warn(note, stacklevel=2)
        for part, folder in parts.items():
            for path, name in zip(folder.paths, folder.names):
                copy = partial / part / name
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, copy)
            counts = [len(files) for _, _, files in os.walk(partial / part) if files]  # of each folder
            folders = {os.path.dirname(name) for name in folder.names}
            if len(counts) < len(folders) or sum(counts) < len(folder.names):
                reason = "takes two names for one, such as Cat and cat; rename them"
                raise ValueError(f"{source} cannot be copied whole: the disk of {target} {reason}")
    train, val = (len(folder.paths) for folder in parts.values())
    print(f"{target}: {train:,} training and {val:,} held-out images")
