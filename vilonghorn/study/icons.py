"""Classification of icons of authors that training has not seen, a task of the studies."""

import json
import os
from collections import Counter
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

from PIL import Image

from ..data.digits import SPLITS
from ..data.icons import PACKAGE, VERSION
from ..data.npm import MANIFEST


@dataclass(frozen=True)
class Icons:
    """The icons that `vilonghorn data icons` writes, with a validation and a test split of disjoint authors.

    "train" is the training split of the data. Their held-out split is divided by author into "val" and "test": the
    authors, those with most images first, go to the split that has fewer images so far.

    The data are opened when a sample is read, so the classes can be counted without them. `repr` names what is in the
    samples; `side` and `folder` are not in it.

    Args:
        split: "train", "val" or "test".
        side: height and width in pixels that the model takes; the loader enlarges the images.
        folder: the data.
        pixels, min_sets, held_out, version: of the data, see `vilonghorn.data.icons.write_icons`.
        num_classes: of the data.
        count: number of images, evenly spaced in the order of classes and files; None: all.
    """

    split: str
    side: int = field(default=64, repr=False)
    folder: str = field(default="data/icons", repr=False)
    pixels: int = 64
    min_sets: int = 30
    held_out: float = 0.2
    version: str = VERSION
    num_classes: int = 480
    count: int | None = None

    def __post_init__(self):
        if self.split not in SPLITS:
            raise ValueError(f"split {self.split!r}: expected one of {', '.join(SPLITS)}")
        for name, least in (("side", 2), ("num_classes", 2), ("count", 1)):
            if (value := getattr(self, name)) is not None and value < least:
                raise ValueError(f"{name} {value}: expected at least {least}")

    @property
    def chance(self) -> float:
        """Accuracy of a guess."""
        return 1 / self.num_classes

    @property
    def classes(self) -> list[str]:
        """Names of the classes; raises the errors of `check`."""
        return list_icons(self.check(), self.split)[0]

    def check(self) -> Path:
        """The folder of the data.

        Raises:
            FileNotFoundError: there are no data; the message says how to make them.
            ValueError: the data were made with other settings.
        """
        folder = Path(self.folder)
        command = (
            f"npm pack {PACKAGE}@{self.version} && vilonghorn data icons iconify-json-{self.version}.tgz {folder} "
            f"--split-by author --size {self.pixels} --min-sets {self.min_sets} --held-out {self.held_out}"
        )
        if not (folder / MANIFEST).is_file():
            raise FileNotFoundError(f"there are no icons in {folder}; make them: {command}")
        made_from = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["made_from"]
        names = "version", "pixels", "min_sets", "held_out"
        expected = {name: getattr(self, name) for name in names} | {"split_by": "author"}
        found = {name: made_from.get(name) for name in expected}
        num_classes = len(list_icons(folder, "train")[0])
        if (found, num_classes) != (expected, self.num_classes):
            raise ValueError(
                f"{folder} has {num_classes} classes, made with {found}; the study has {self.num_classes}, made with "
                f"{expected}: remove the folder, and make it anew: {command}"
            )
        return folder

    @cached_property
    def files(self) -> list[tuple[Path, int]]:
        """File and label of each sample; raises the errors of `check`."""
        files = list_icons(self.check(), self.split)[1]
        count = len(files) if self.count is None else self.count
        if count > len(files):
            raise ValueError(f"count {count}: split {self.split} of {self.folder} has {len(files)} icons")
        return [files[index * len(files) // count] for index in range(count)]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        file, label = self.files[index]
        return Image.open(file).convert("RGB"), label


@cache
def list_icons(folder: Path, split: str) -> tuple[list[str], list[tuple[Path, int]]]:
    """The names of the classes, and file and label of each icon of a split, ordered by class and file."""
    sets = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["sets"]
    classes = sorted(entry.name for entry in os.scandir(folder / "train") if entry.is_dir())
    source = folder / ("train" if split == "train" else "val")
    found = [(file, label) for label, name in enumerate(classes) for file in sorted((source / name).glob("*.png"))]
    if split == "train":
        return classes, found
    authors = [sets[file.name.partition("_")[0]]["author"] for file, _ in found]
    counts, totals, splits = Counter(authors), {"val": 0, "test": 0}, {}
    for author in sorted(counts, key=lambda author: (-counts[author], author)):
        splits[author] = min(totals, key=totals.__getitem__)  # "val" of equal ones
        totals[splits[author]] += counts[author]
    return classes, [pair for pair, author in zip(found, authors) if splits[author] == split]
