"""The tasks of the studies: recall in mosaics of handwritten digits, icons, Fashion-MNIST, solar cells, and Pathfinder.

A task is a map-style dataset of (image, label). Its `repr` names all that its samples depend on: files of data and
results are recognised by it.
"""

import gzip
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from icons import PACKAGE, VERSION
from npm import MANIFEST
from PIL import Image

from vilonghorn import read_image
from vilonghorn.data import write_beton

from .digits import PIXELS, SPLITS, check_split, load_split
from .pathfinder import Pathfinder

COLOURS = ((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (1, 0, 1), (0, 1, 1))  # red, green, blue, yellow, magenta, cyan


class Mosaic(NamedTuple):
    """The layout of a mosaic."""

    slots: np.ndarray  # (pairs,) place of each pair: slot s is tiles 2s and 2s + 1 in raster order
    keys: np.ndarray  # (pairs,) colour * 10 + digit, all different
    values: np.ndarray  # (pairs,) digits
    query: int  # index of the pair whose key the last tile shows
    tiles: np.ndarray  # (grid ** 2,) position of each tile's digit in the split, -1 for an empty tile
    label: int  # the value of that pair


@dataclass(frozen=True)
class Recall:
    """Associative recall in mosaics of digits: an image form of MQAR (Arora et al., "Zoology", arXiv 2312.04927).

    A pair is a key (a coloured digit) and a value (a white digit) in neighbouring tiles. The last tile is the query: a
    key again, as another original of the same digit. The label is the value of the key. Pairs stand in random places.
    The other tiles are empty, or hold dark digits on white ground with `distractors`. The splits share no digit.

    Nothing but recall finds the label. Keys, query and places are uniform and independent of the values, so the query
    alone gives an accuracy of 1/10. Each digit is a value pairs / 10 times, rounded down or up, so the tiles without
    their places give an accuracy of `chance`, which is 1 / pairs for up to ten pairs.

    Args:
        split: "train", "val" or "test".
        pairs: at least 1; at most the number of keys and the pairs that fit into the grid.
        grid: tiles per side, even, so that no pair is broken over two rows; a tile is 8 pixels wide.
        colours: 1 to 6; there are 10 * colours keys.
        distractors: fill the other tiles.
        count: number of mosaics.
        seed: of the mosaics.
    """

    split: str
    pairs: int = 4
    grid: int = 4
    colours: int = 2
    distractors: bool = False
    count: int = 1024
    seed: int = 0

    classes: ClassVar[list[str]] = [str(digit) for digit in range(10)]
    num_classes: ClassVar[int] = 10

    def __post_init__(self):
        load_split(self.split)
        if self.grid < 2 or self.grid % 2:
            raise ValueError(f"grid {self.grid}: expected an even number of tiles, at least 2")
        if not 1 <= self.colours <= len(COLOURS):
            raise ValueError(f"colours {self.colours}: expected 1 to {len(COLOURS)}")
        most = min(10 * self.colours, self.room)
        if not 1 <= self.pairs <= most:
            raise ValueError(
                f"pairs {self.pairs}: expected 1 to {most}: there are {10 * self.colours} keys, "
                f"and a grid of {self.grid} has room for {self.room} pairs"
            )
        if self.count < 1 or self.seed < 0:
            raise ValueError(f"count {self.count}, seed {self.seed}: expected at least 1 and at least 0")

    @property
    def room(self) -> int:
        """Number of pairs that fit into the grid, beside the query."""
        return (self.grid**2 - 1) // 2

    @property
    def side(self) -> int:
        """Height and width in pixels."""
        return self.grid * PIXELS

    def check(self) -> None:
        """Does nothing: scikit-learn has the data."""

    @property
    def chance(self) -> float:
        """Accuracy of the best guess from all tiles without their places: a most frequent value."""
        return -(-self.pairs // 10) / self.pairs

    def __len__(self) -> int:
        return self.count

    def mosaic(self, index: int) -> Mosaic:
        """The layout of sample `index`."""
        if not 0 <= index < self.count:
            raise IndexError(f"sample {index} of {self.count}")
        rng = np.random.default_rng([self.seed, SPLITS.index(self.split), index])
        digits = load_split(self.split)
        keys = rng.permutation(10 * self.colours)[: self.pairs]
        rounds, rest = divmod(self.pairs, 10)
        values = rng.permutation(np.concatenate([np.tile(np.arange(10), rounds), rng.permutation(10)[:rest]]))
        slots = rng.permutation(self.room)[: self.pairs].copy()  # not a view, which would keep all places
        query = rng.permutation(self.pairs)[0]
        tiles = np.full(self.grid**2, -1, np.int16)
        if self.distractors:
            for part in np.array_split(tiles, -(-len(tiles) // 2**16)):  # the numbers of one call, with less memory
                part[:] = rng.integers(len(digits.labels), size=len(part))
        for pair, (key, value, slot) in enumerate(zip(keys % 10, values, slots)):
            of_key, of_value = digits.by_label[key], digits.by_label[value]
            first = rng.integers(len(of_key))
            other = (first + rng.integers(1, len(of_key))) % len(of_key)
            tiles[2 * slot : 2 * slot + 2] = of_key[first], of_value[rng.integers(len(of_value))]
            if pair == query:
                tiles[-1] = of_key[other]
        return Mosaic(slots, keys, values, query, tiles, int(values[query]))

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        """The mosaic, (side, side, 3) uint8, and its label."""
        mosaic = self.mosaic(index)
        rows = self.pixels(mosaic).reshape(self.grid, self.grid, PIXELS, PIXELS, 3).transpose(0, 2, 1, 3, 4)
        return rows.reshape(self.side, self.side, 3), mosaic.label

    def pixels(self, mosaic: Mosaic, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Tiles `start` to `stop` - 1 of a mosaic in raster order, (tiles, 8, 8, 3) uint8."""
        ink = load_split(self.split).images[mosaic.tiles[start:stop], :, :, None]  # (tiles, 8, 8, 1)
        tiles = np.repeat(255 - ink if self.distractors else np.zeros_like(ink), 3, axis=3)
        places = np.concatenate([2 * mosaic.slots, 2 * mosaic.slots + 1, [len(mosaic.tiles) - 1]]) - start
        keys = np.asarray(COLOURS, np.uint8)[mosaic.keys // 10]
        colours = np.concatenate([keys, np.ones_like(keys), keys[[mosaic.query]]])
        inside = (places >= 0) & (places < len(tiles))
        tiles[places[inside]] = ink[places[inside]] * colours[inside, None, None]
        return tiles


class ImageFiles:
    """A dataset of `files`, pairs of a file and its label, which are read when a sample is."""

    files: Sequence[tuple[Path, int]]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        file, label = self.files[index]
        return read_image(file), label


@dataclass(frozen=True)
class Icons(ImageFiles):
    """Classification of icons whose authors are not in the training split, from the folder that `icons.py` writes.

    "train" is the training split of the data. Their held-out split is divided by author into "val" and "test": the
    authors, those with most images first, go to the split that has fewer images so far. The files are read when a
    sample is, so the classes can be counted without them.

    Args:
        split: "train", "val" or "test".
        side: height and width in pixels that the model takes; the loader enlarges the images.
        folder: the data.
        pixels, min_sets, held_out, version: of the data, as its manifest says.
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
        check_split(self.split)
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
        command = f"npm pack {PACKAGE}@{self.version} && python studies/data/icons.py {folder}"
        if not (folder / MANIFEST).is_file():
            raise FileNotFoundError(f"there are no icons in {folder}; make them: {command}")
        made_from = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["made_from"]
        expected = {name: getattr(self, name) for name in ("version", "pixels", "min_sets", "held_out")}
        expected |= {"split_by": "author", "num_classes": self.num_classes}
        found = {**made_from, "num_classes": len(list_icons(folder, "train")[0])}
        if found := {name: found.get(name) for name, value in expected.items() if found.get(name) != value}:
            raise ValueError(f"{folder} was made with {found}, expected {self}: remove it, and run: {command}")
        return folder

    @cached_property
    def files(self) -> list[tuple[Path, int]]:
        """File and label of each sample; raises the errors of `check`."""
        files = list_icons(self.check(), self.split)[1]
        count = len(files) if self.count is None else self.count
        if count > len(files):
            raise ValueError(f"count {count}: split {self.split} of {self.folder} has {len(files)} icons")
        return [files[index * len(files) // count] for index in range(count)]


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


@dataclass(frozen=True)
class Fashion:
    """Fashion-MNIST (Xiao et al., arXiv 1708.07747): gray photographs of ten kinds of clothing, 28 x 28 pixels.

    They have a black frame of 2 pixels here. "test" is the published test set; every twelfth of the 60,000 training
    images is in "val".

    Args:
        split: "train", "val" or "test".
        folder: of the Debian package dataset-fashion-mnist.
        count: number of images, the first ones; None: all.
    """

    split: str
    folder: str = "/usr/share/datasets/fashion-mnist"
    count: int | None = None

    side: ClassVar[int] = 32
    num_classes: ClassVar[int] = 10
    chance: ClassVar[float] = 0.1
    classes: ClassVar[list[str]] = [
        *("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
    ]

    def __post_init__(self):
        check_split(self.split)

    def check(self) -> None:
        """Raises FileNotFoundError if the package is not installed."""
        if not Path(self.folder).is_dir():
            raise FileNotFoundError(f"there is no {self.folder}; run: apt-get install dataset-fashion-mnist")

    @cached_property
    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Images (n, 32, 32) uint8, and labels; raises the errors of `check`."""
        self.check()
        name = "t10k" if self.split == "test" else "train"
        found = []
        for kind, header in (("images-idx3", 16), ("labels-idx1", 8)):
            content = gzip.decompress(Path(self.folder, f"{name}-{kind}-ubyte.gz").read_bytes())
            found.append(np.frombuffer(content, np.uint8, offset=header))
        images, labels = found[0].reshape(-1, 28, 28), found[1].astype(np.int64)
        if self.split != "test":
            chosen = (np.arange(len(labels)) % 12 == 11) == (self.split == "val")
            images, labels = images[chosen], labels[chosen]
        return np.pad(images[: self.count], ((0, 0), (2, 2), (2, 2))), labels[: self.count]

    def __len__(self) -> int:
        return len(self.arrays[1])

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        images, labels = self.arrays
        return Image.fromarray(images[index]).convert("RGB"), int(labels[index])


@dataclass(frozen=True)
class SolarCells(ImageFiles):
    """Defects of solar cells in the electroluminescence photographs of ELPV (Buerhop-Lutz et al., 2018).

    2,624 gray photographs of 300 x 300 pixels. A cell is defective if its probability of a defect is above 0.5. The
    photographs of each probability and kind of cell are dealt to five folds in turn. One fold is "test"; of the others,
    every eighth photograph is in "val". Folds 6 to 10, and so on to 25, are those of the photographs in another order.

    Args:
        split: "train", "val" or "test".
        fold: of "test", 1 to 25.
        side: height and width in pixels that the model takes.
        folder: `elpv_dataset/data` of PyPI's elpv-dataset.
        count: number of photographs, the first ones; None: all.
    """

    split: str
    fold: int = 1
    side: int = field(default=288, repr=False)
    folder: str = field(default="data/elpv_dataset/data", repr=False)
    count: int | None = None

    num_classes: ClassVar[int] = 2
    classes: ClassVar[list[str]] = ["functional", "defective"]

    def __post_init__(self):
        check_split(self.split)
        if not 1 <= self.fold <= 25:
            raise ValueError(f"fold {self.fold}: expected 1 to 25")

    def check(self) -> None:
        """Raises FileNotFoundError if there are no data; the message says how to get them."""
        if not Path(self.folder, "labels.csv").is_file():
            raise FileNotFoundError(
                f"there are no solar cells in {self.folder}; run: pip install --no-deps --target data elpv-dataset"
            )

    @cached_property
    def files(self) -> list[tuple[Path, int]]:
        """File and label of each sample; raises the errors of `check`."""
        self.check()
        lines = Path(self.folder, "labels.csv").read_text(encoding="utf-8").splitlines()
        repetition, fold = divmod(self.fold - 1, 5)
        rows = sorted((probability, kind, file) for file, probability, kind in map(str.split, lines))
        if repetition:
            order = np.random.default_rng(repetition).permutation(len(rows))
            rows = [row for _, row in sorted(zip(order, rows))]
            rows.sort(key=lambda row: row[:2])  # stable
        chosen = [row for i, row in enumerate(rows) if (i % 5 == fold) == (self.split == "test")]
        if self.split != "test":
            chosen = [row for i, row in enumerate(chosen) if (i % 8 == 7) == (self.split == "val")]
        return [(Path(self.folder, file), int(float(defect) > 0.5)) for defect, _, file in chosen[: self.count]]

    @property
    def chance(self) -> float:
        """Accuracy of the most frequent class."""
        defective = sum(label for _, label in self.files) / len(self)
        return max(defective, 1 - defective)


Task = Fashion | Icons | Pathfinder | Recall | SolarCells
KINDS = {"fashion": Fashion, "icons": Icons, "pathfinder": Pathfinder, "recall": Recall, "solar_cells": SolarCells}


def make_task(kind: str, split: str, count: int | None = None, **options: Any) -> Task:
    """A split of a task as a map-style dataset of (image, label).

    Args:
        kind: a key of `KINDS`.
        split: "train", "val" or "test".
        count: number of images; None: 1024 if they are drawn, else all.
        options: of the class of `KINDS`.

    Raises:
        TypeError, ValueError: an unknown kind or option, or a value out of range.
    """
    if kind not in KINDS:
        raise ValueError(f"task {kind!r}: expected one of {', '.join(KINDS)}")
    return KINDS[kind](split, **options, **({} if count is None else {"count": count}))


def write_task(dataset: Task, path: Path) -> None:
    """Writes a split of a task as a `.beton` file of raw pixels into a folder that exists; see `write_beton`."""
    write_beton(dataset, path, max_resolution=max(500, dataset.side), workers=1, progress=False)
