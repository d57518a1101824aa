"""Visual associative recall: what went with this key? The form for images of multi-query associative recall (MQAR,
Arora et al., "Zoology", arXiv 2312.04927), whose tokens are tiles of a mosaic of real digits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..data.specimens import PIXELS, SPLITS, specimens

COLOURS = ((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (1, 0, 1), (0, 1, 1))  # red, green, blue, yellow, magenta, cyan
MAX_QUERIES = 3  # a label is a number with a digit for each


@dataclass(frozen=True)
class Mosaic:
    """What a mosaic says, before it is painted.

    Attributes:
        slots: (pairs,) which two neighbouring tiles each pair takes: tiles 2s and 2s + 1 in raster order.
        keys: (pairs,) colour * 10 + digit, all different.
        values: (pairs,) digits.
        asked: (queries,) which pairs are asked for, in the order of the last tiles.
        tiles: (grid ** 2,) specimen in each tile, -1 in an empty one.
        label: the values asked for, read as one number.
    """

    slots: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    asked: np.ndarray
    tiles: np.ndarray
    label: int


@dataclass(frozen=True)
class Recall:
    """A mosaic of pairs (key, value) in neighbouring tiles, with one or more keys asked for in the last tiles.

    A key is a digit in a colour, a value a white digit; the query shows the same key, from another original or, with
    `same_original`, as the very picture, so that keys need not be recognised but found again. The label is the value
    that went with it. Pairs stand in random places; other tiles are empty or, with `distractors` (long recall), hold
    dark digits on white ground that mean nothing.

    No shortcut: keys, which of them is asked for, and places are uniform and independent of the values, so whoever
    sees only the query is right once in ten. Values are as different as they can be (each digit is
    pairs / 10 values, rounded down or up), so whoever sees all tiles but not which stand together is right
    `chance` of the time: 1 / pairs for up to ten pairs.

    Args:
        split: "train", "val" or "test": of the digits, and of the mosaics.
        pairs: from 1; at most the keys, and what the grid has room for.
        grid: tiles a side, even, so that no pair is broken over two rows; each is 8 pixels.
        colours: 1 to 6; there are 10 * colours keys.
        queries: 1 to 3 keys that are asked for; 10 ** queries classes.
        distractors: fill the other tiles.
        same_original: ask by the picture of the key itself.
        count: mosaics.
        seed: of the mosaics.
    """

    split: str
    pairs: int = 4
    grid: int = 4
    colours: int = 2
    queries: int = 1
    distractors: bool = False
    same_original: bool = False
    count: int = 1024
    seed: int = 0

    def __post_init__(self):
        specimens(self.split)
        if self.grid < 2 or self.grid % 2:
            raise ValueError(f"grid {self.grid}: expected an even number of tiles, at least 2")
        if not 1 <= self.colours <= len(COLOURS):
            raise ValueError(f"colours {self.colours}: expected 1 to {len(COLOURS)}")
        if not 1 <= self.queries <= MAX_QUERIES:
            raise ValueError(f"queries {self.queries}: expected 1 to {MAX_QUERIES}")
        most = min(10 * self.colours, self.room)
        if not self.queries <= self.pairs <= most:
            raise ValueError(
                f"pairs {self.pairs}: expected {self.queries} to {most}, for there are {10 * self.colours} keys and room "
                f"for {self.room} pairs in a grid of {self.grid}"
            )
        if self.count < 1 or self.seed < 0:
            raise ValueError(f"count {self.count}, seed {self.seed}: expected at least 1 and 0")

    @property
    def room(self) -> int:
        """Pairs that the grid has room for, beside the queries."""
        return (self.grid**2 - self.queries) // 2

    @property
    def side(self) -> int:
        """Height and width of a mosaic, in pixels."""
        return self.grid * PIXELS

    @property
    def classes(self) -> list[str]:
        return [f"{label:0{self.queries}d}" for label in range(10**self.queries)]

    @property
    def chance(self) -> float:
        """Accuracy of the best guess of whoever sees all tiles, but not their places.

        With several queries, the best guess is an ordered choice of values from the most frequent ones; given here for
        one query exactly, for more as the probability of one such choice.
        """
        left, right = np.bincount(self._values(np.random.default_rng(0)), minlength=10), 1.0
        for taken in range(self.queries):
            right *= left.max() / (self.pairs - taken)
            left[left.argmax()] -= 1
        return float(right)

    def __len__(self) -> int:
        return self.count

    def _values(self, rng: np.random.Generator) -> np.ndarray:
        rounds, rest = divmod(self.pairs, 10)
        values = np.concatenate([np.tile(np.arange(10), rounds), rng.permutation(10)[:rest]])
        return rng.permutation(values)

    def mosaic(self, index: int) -> Mosaic:
        """Draws sample `index`."""
        if not 0 <= index < self.count:
            raise IndexError(f"sample {index} of {self.count}")
        rng = np.random.default_rng([self.seed, SPLITS.index(self.split), index])
        digits = specimens(self.split)
        keys = rng.permutation(10 * self.colours)[: self.pairs]
        values = self._values(rng)
        slots = rng.permutation(self.room)[: self.pairs]
        asked = rng.permutation(self.pairs)[: self.queries]
        tiles = np.full(self.grid**2, -1)
        if self.distractors:
            tiles[:] = rng.integers(len(digits.labels), size=len(tiles))
        for pair, (key, value, slot) in enumerate(zip(keys % 10, values, slots)):
            hands, values_hands = digits.of[key], digits.of[value]
            first = rng.integers(len(hands))
            other = first if self.same_original else (first + rng.integers(1, len(hands))) % len(hands)
            tiles[2 * slot : 2 * slot + 2] = hands[first], values_hands[rng.integers(len(values_hands))]
            for place in np.flatnonzero(asked == pair):
                tiles[len(tiles) - self.queries + place] = hands[other]
        label = int("".join(str(value) for value in values[asked]))
        return Mosaic(slots, keys, values, asked, tiles, label)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        """The mosaic, (side, side, 3) uint8, and its label."""
        mosaic = self.mosaic(index)
        ink = specimens(self.split).images[mosaic.tiles, :, :, None]  # (tiles, 8, 8, 1)
        tiles = np.repeat(255 - ink if self.distractors else np.zeros_like(ink), 3, axis=3)
        colours = np.asarray(COLOURS, np.uint8)[mosaic.keys // 10][:, None, None]
        key, query = 2 * mosaic.slots, np.arange(len(tiles) - self.queries, len(tiles))
        tiles[key] = ink[key] * colours
        tiles[key + 1] = ink[key + 1]
        tiles[query] = ink[query] * colours[mosaic.asked]
        rows = tiles.reshape(self.grid, self.grid, PIXELS, PIXELS, 3).transpose(0, 2, 1, 3, 4)
        return rows.reshape(self.side, self.side, 3), mosaic.label
