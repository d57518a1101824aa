"""The tasks of the studies: recall in mosaics of scikit-learn's handwritten digits, and icons.

The splits of mosaics share no original digit (see `load_split`). Sample i of a split depends only on the options, the
split and i.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..data.beton.writer import write_beton
from ..data.digits import PIXELS, SPLITS, load_split
from .icons import Icons

__all__ = ["KINDS", "Recall", "Task", "make_task", "write_task"]

COLOURS = ((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (1, 0, 1), (0, 1, 1))  # red, green, blue, yellow, magenta, cyan
CLASSES = [str(digit) for digit in range(10)]


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
    The other tiles are empty, or hold dark digits on white ground with `distractors`.

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

    @property
    def classes(self) -> list[str]:
        """Names of the classes."""
        return CLASSES

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(CLASSES)

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
        slots = rng.permutation(self.room)[: self.pairs]
        query = rng.permutation(self.pairs)[0]
        tiles = np.full(self.grid**2, -1)
        if self.distractors:
            tiles[:] = rng.integers(len(digits.labels), size=len(tiles))
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
        ink = load_split(self.split).images[mosaic.tiles, :, :, None]  # (tiles, 8, 8, 1)
        tiles = np.repeat(255 - ink if self.distractors else np.zeros_like(ink), 3, axis=3)
        colours = np.asarray(COLOURS, np.uint8)[mosaic.keys // 10][:, None, None]
        key = 2 * mosaic.slots
        tiles[key] = ink[key] * colours
        tiles[key + 1] = ink[key + 1]
        tiles[-1] = ink[-1] * colours[mosaic.query]
        rows = tiles.reshape(self.grid, self.grid, PIXELS, PIXELS, 3).transpose(0, 2, 1, 3, 4)
        return rows.reshape(self.side, self.side, 3), mosaic.label


Task = Icons | Recall
KINDS = {"icons": Icons, "recall": Recall}


def make_task(kind: str, split: str, count: int | None = None, **options: Any) -> Task:
    """A split of a task as a map-style dataset of (image, label).

    Args:
        kind: "icons" or "recall".
        split: "train", "val" or "test".
        count: number of images; None: 1024 mosaics, all icons.
        options: of `Icons` or `Recall`.

    Raises:
        TypeError, ValueError: an unknown kind or option, or a value out of range.
    """
    if kind not in KINDS:
        raise ValueError(f"task {kind!r}: expected one of {', '.join(KINDS)}")
    return KINDS[kind](split, **options, **({} if count is None else {"count": count}))


def write_task(dataset: Task, path: Path) -> None:
    """Writes a split of a task as a `.beton` file of raw pixels into a folder that exists; see `write_beton`."""
    write_beton(dataset, path, max_resolution=max(500, dataset.side), workers=1, progress=False)
