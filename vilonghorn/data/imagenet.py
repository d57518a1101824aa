"""ImageNet's validation images as they are distributed: in one flat folder, with their classes in another file."""

import os
import re
from pathlib import Path

import numpy as np

from .images import EXTENSIONS, MAX_PIXELS, ImageFiles

GROUND_TRUTH = "ILSVRC2012_validation_ground_truth.txt"
META = "meta.mat"
EXPECTED = (
    f"expected the folder of the devkit with data/{GROUND_TRUTH} (line i: the class number of image i) and "
    f"data/{META}, or a table with a line for each image (NAME,CLASS), such as LOC_val_solution.csv"
)


def flat_images(root: str | os.PathLike, labels: str | os.PathLike, max_pixels: int = MAX_PIXELS) -> ImageFiles:
    """The images of a flat folder, labelled by the position of their class among the sorted names of all classes.

    Class folders get the same labels: train/nXXXXXXXX/*.JPEG.

    Args:
        root: a folder of images, such as ILSVRC2012_val_00000001.JPEG to ILSVRC2012_val_00050000.JPEG.
        labels: the devkit's folder (ILSVRC2012_devkit_t12), or a table of (image, class).
        max_pixels: width times height above which an image is refused when it is opened.

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
    known, of_images = _read_devkit(labels, names) if labels.is_dir() else _read_table(labels, names)
    classes, numbers = np.unique(known + of_images, return_inverse=True)
    paths = [str(root / name) for name in names]
    return ImageFiles(root, classes.tolist(), paths, numbers[len(known) :].astype(np.int64), max_pixels)


def _read_devkit(folder: Path, names: list[str]) -> tuple[list[str], list[str]]:
    """The names of all classes, and of the class of each image."""
    data = folder / "data" if (folder / "data").is_dir() else folder
    truth = data / GROUND_TRUTH
    if not truth.is_file():
        raise FileNotFoundError(f"{truth}: no such file; {EXPECTED}")
    synsets = _read_synsets(data / META)
    numbers = truth.read_text(encoding="ascii", errors="replace").split()
    bad = next((n for n in numbers if not n.isdecimal() or not 1 <= int(n) <= len(synsets)), None)
    if bad is not None:
        raise ValueError(f"{truth}: {bad!r} is not a class number; expected 1 to {len(synsets)}")
    found = [int(match[1]) if (match := re.search(r"_(\d+)\.\w+$", name)) else 0 for name in names]
    if found != list(range(1, len(numbers) + 1)):
        wrong = next((name for i, (name, n) in enumerate(zip(names, found), 1) if n != i), names[-1])
        raise ValueError(
            f"{names[0]} to {names[-1]}: {len(names)} images for the {len(numbers)} lines of {truth}; expected images "
            f"numbered from 1 on, one for each line; the first that does not fit is {wrong}"
        )
    return synsets, [synsets[int(n) - 1] for n in numbers]


def _read_synsets(meta: Path) -> list[str]:
    """Names of the classes, in the order of their numbers."""
    if not meta.is_file():
        raise FileNotFoundError(f"{meta}: no such file; {EXPECTED}")
    try:
        from scipy.io import loadmat

        rows = loadmat(str(meta), squeeze_me=True)["synsets"]
        leaves = sorted((int(row["ILSVRC2012_ID"]), str(row["WNID"])) for row in rows if row["num_children"] == 0)
    except ImportError as error:
        raise ImportError(f"{meta}: reading it needs SciPy; run: pip install scipy") from error
    except Exception as error:  # SciPy raises nearly any exception on a damaged file
        raise ValueError(f"{meta}: not the devkit's ({error!r}); {EXPECTED}") from error
    return [name for _, name in leaves]


def _read_table(file: Path, names: list[str]) -> tuple[list[str], list[str]]:
    """The names of all classes, and of the class of each image, from the first two words of each line."""
    rows = [line.replace(",", " ").split() for line in file.read_text(encoding="utf-8").splitlines()]
    by_stem = {Path(row[0]).stem: row[1] for row in rows if len(row) >= 2 and row[0] != "ImageId"}
    if missing := [name for name in names if Path(name).stem not in by_stem]:
        what = f"no line for {len(missing)} of the {len(names)} images, the first {missing[0]}"
        raise ValueError(f"{file}: {what}; {EXPECTED}")
    return list(by_stem.values()), [by_stem[Path(name).stem] for name in names]
