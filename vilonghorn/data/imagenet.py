"""ImageNet's validation images as they are distributed: in one flat folder, with their classes in another file.

Two files can tell the classes: the devkit of ILSVRC2012, or a table of (image, class) such as LOC_val_solution.csv.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np

from .images import EXTENSIONS, ImageFiles

GROUND_TRUTH = "ILSVRC2012_validation_ground_truth.txt"
META = "meta.mat"
SYNSETS = "synsets.txt"
EXPECTED = (
    f"expected the folder of the devkit with data/{GROUND_TRUTH} (line i: the class number of image i) and "
    f"data/{META}, or in its place data/{SYNSETS} (line n: the name of class number n, such as n02119789), or a table "
    "with a line for each image (NAME,CLASS), such as LOC_val_solution.csv"
)


def flat_images(root: str | os.PathLike, labels: str | os.PathLike) -> ImageFiles:
    """The images of a flat folder, labelled by the position of their class among the sorted names of all classes.

    That is how class folders are labelled, too: train/nXXXXXXXX/*.JPEG gets the same labels.

    Args:
        root: a folder of images, such as ILSVRC2012_val_00000001.JPEG to ILSVRC2012_val_00050000.JPEG.
        labels: the devkit's folder (ILSVRC2012_devkit_t12), or a table of (image, class).

    Raises:
        FileNotFoundError, NotADirectoryError: a folder or file is missing; the message says which are expected.
        ValueError: images and labels do not belong together.
    """
    root, labels = Path(root), Path(labels)
    if not root.is_dir():
        raise NotADirectoryError(f"{root}: no such folder; expected one with images in it")
    names = sorted(p.name for p in root.iterdir() if p.name.lower().endswith(EXTENSIONS) and not p.name.startswith("."))
    if not names:
        raise ValueError(f"{root}: no images in it; expected files such as ILSVRC2012_val_00000001.JPEG")
    if not labels.exists():
        raise FileNotFoundError(f"{labels}: no such file or folder; {EXPECTED}")
    known, wanted = _devkit(labels, names) if labels.is_dir() else _table(labels, names)
    classes = sorted(set(known))
    position = {name: label for label, name in enumerate(classes)}
    paths = [str(root / name) for name in names]
    return ImageFiles(root, classes, paths, np.array([position[name] for name in wanted], np.int64))


def _devkit(folder: Path, names: list[str]) -> tuple[list[str], list[str]]:
    """The names of all classes, and of the class of each image, by the devkit."""
    data = folder / "data" if (folder / "data").is_dir() else folder
    truth = data / GROUND_TRUTH
    if not truth.is_file():
        raise FileNotFoundError(f"{truth}: no such file; {EXPECTED}")
    synsets = _synsets(data)
    numbers = truth.read_text(encoding="ascii", errors="replace").split()
    bad = next((n for n in numbers if not n.isdecimal() or not 1 <= int(n) <= len(synsets)), None)
    if bad is not None:
        raise ValueError(f"{truth}: {bad!r} is no class number; expected 1 to {len(synsets)}")
    found = [int(match[1]) if (match := re.search(r"_(\d+)\.\w+$", name)) else 0 for name in names]
    if found != list(range(1, len(numbers) + 1)):
        odd = next((name for name, n, i in zip(names, found, range(1, len(names) + 1)) if n != i), names[-1])
        raise ValueError(
            f"{names[0]} to {names[-1]}: {len(names)} images for the {len(numbers)} lines of {truth}, which are those "
            f"of images numbered from 1 on; the first that does not fit is {odd}"
        )
    return synsets, [synsets[int(n) - 1] for n in numbers]


def _synsets(data: Path) -> list[str]:
    """Names of the classes, in the order of their numbers."""
    if (data / SYNSETS).is_file():
        synsets = (data / SYNSETS).read_text(encoding="utf-8").split("\n")
        synsets = [line.split()[0] for line in synsets if line.strip()]
    elif (data / META).is_file():
        try:
            from scipy.io import loadmat
        except ImportError as error:
            raise ImportError(f"{data / META}: reading it needs SciPy (pip install scipy), or {SYNSETS}") from error
        try:
            rows = loadmat(str(data / META), squeeze_me=True)["synsets"]
            leaves = sorted((int(row["ILSVRC2012_ID"]), str(row["WNID"])) for row in rows if row["num_children"] == 0)
        except Exception as error:  # a damaged file can raise nearly anything out of SciPy
            raise ValueError(f"{data / META}: not the devkit's ({error!r}); {EXPECTED}") from error
        if [number for number, _ in leaves] != list(range(1, len(leaves) + 1)):
            raise ValueError(f"{data / META}: its classes without children are not numbered from 1 on; {EXPECTED}")
        synsets = [name for _, name in leaves]
    else:
        raise FileNotFoundError(f"{data / META}: no such file; {EXPECTED}")
    if not synsets or len(set(synsets)) < len(synsets):
        raise ValueError(f"{data}: the names of its classes are not distinct; {EXPECTED}")
    return synsets


def _table(file: Path, names: list[str]) -> tuple[list[str], list[str]]:
    """The names of all classes, and of the class of each image, by the first two words of the lines of a table."""
    rows = [line.replace(",", " ").split() for line in file.read_text(encoding="utf-8").splitlines()]
    by_stem = {Path(row[0]).stem: row[1] for row in rows if len(row) >= 2 and row[0] != "ImageId"}
    missing = [name for name in names if Path(name).stem not in by_stem]
    if missing:
        what = f"no line for {len(missing)} of the {len(names)} images, the first {missing[0]}"
        raise ValueError(f"{file}: {what}; {EXPECTED}")
    return list(by_stem.values()), [by_stem[Path(name).stem] for name in names]
