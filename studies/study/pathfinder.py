"""Pathfinder: are two discs on one dashed path? Images of 32 x 32 pixels, drawn when a sample is read.

Source of the task and of its rules: Linsley et al., "Learning long-range spatial dependencies with horizontal gated
recurrent units", arXiv 1805.08315 (github.com/drewlinsley/pathfinder), with the settings at 32 pixels of Long Range
Arena, Tay et al., arXiv 2011.04006 (google-research/long-range-arena, lra_benchmarks/data/pathfinder.py).
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from .digits import SPLITS, check_split

LENGTH, GAP = 2.0, 2.0  # of a dash, and between the dashes of a straight path, in pixels
APART = 3.0  # least distance of dashes that do not follow each other
BORDER = 2.0  # least distance of a dash from the edge of the image
START_DISTANCE = 7.0  # between the starts of the two long paths
RADIUS = 1.5  # of a disc
TRIALS = 8  # directions that are tried for a dash, or places for the first one


class Drawing(NamedTuple):
    """What an image shows. A point is x + iy in pixels from the upper left corner."""

    paths: list[np.ndarray]  # (dashes, 2) complex: both ends of each dash, in order; first the two long paths
    discs: tuple[complex, complex]  # the start of a long path, and the end of the same one or of the other
    label: int  # 1: of the same


@dataclass(frozen=True)
class Pathfinder:
    """Two discs stand at the ends of one of two long dashed paths (label 1), or at an end of each (label 0).

    The long paths start 7 pixels from each other, the first near the middle, and grow by turns. At each dash a path
    turns by an angle with density cos^2. Shorter paths, a third as long, are distractors; those that find no room are
    left out. Labels are drawn first and paths do not depend on them, so both classes have the same paths.

    It differs from the public generator in this: points are not rounded to whole pixels; dashes that do not follow each
    other are at least 3 pixels apart, where there masks of whole pixels must not overlap, so a path can always be told
    from another; up to eight directions are tried for a dash, or places for the first dash of a short path.

    Args:
        split: "train", "val" or "test".
        dashes: of a long path, at least 3; the public settings are 6, 9 and 14 (Long Range Arena: 14).
        distractors: number of dashes in short paths, about; at least 0.
        equal: keep only paths whose ends are equally far from the first disc, within a pixel. By the public rules the
            distance of the discs alone gives 63% of labels right with 6 dashes, and 92% with 3.
        count: number of images.
        seed: of the images.
    """

    split: str
    dashes: int = 14
    distractors: int = 20
    equal: bool = False
    count: int = 1024
    seed: int = 0

    side: ClassVar[int] = 32
    num_classes: ClassVar[int] = 2
    chance: ClassVar[float] = 0.5
    classes: ClassVar[list[str]] = ["two paths", "one path"]

    def __post_init__(self):
        check_split(self.split)
        if self.dashes < 3 or self.distractors < 0 or self.count < 1 or self.seed < 0:
            raise ValueError(f"{self}: expected at least 3 dashes, 0 distractors, a count of 1 and a seed of 0")

    def check(self) -> None:
        """Does nothing: there are no files."""

    def __len__(self) -> int:
        return self.count

    def drawing(self, index: int) -> Drawing:
        """What sample `index` shows."""
        if not 0 <= index < self.count:
            raise IndexError(f"sample {index} of {self.count}")
        rng = np.random.default_rng([self.seed, SPLITS.index(self.split), index])
        label, first = rng.integers(2, size=2).tolist()
        last = first if label else 1 - first
        while (canvas := self._long_paths(rng, first)) is None:
            pass
        short = self.dashes // 3
        for _ in range(self.distractors // short):
            canvas.add_paths(rng, BORDER + (self.side - 2 * BORDER) * rng.random((1, TRIALS, 2)), short)
        return Drawing(canvas.paths, (complex(canvas.paths[first][0, 0]), complex(canvas.paths[last][-1, 1])), label)

    def _long_paths(self, rng: np.random.Generator, first: int) -> "Canvas | None":
        canvas, start, angle = Canvas(self.side), self.side / 2 - 2 + 4 * rng.random(2), 2 * np.pi * rng.random()
        starts = np.stack([start, start + START_DISTANCE * np.array([np.cos(angle), np.sin(angle)])])
        if not canvas.add_paths(rng, starts[:, None].repeat(TRIALS, 1), self.dashes):
            return None
        one, other = (abs(canvas.paths[first][0, 0] - path[-1, 1]) for path in canvas.paths)
        return None if self.equal and abs(one - other) > 1 else canvas

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        """The image, RGB, and its label."""
        drawing = self.drawing(index)
        picture = Image.new("L", (2 * self.side, 2 * self.side))  # strokes are half a pixel wide
        draw = ImageDraw.Draw(picture)
        for path in drawing.paths:
            for line in np.rint(2 * path.view(float) - 0.5).astype(int).tolist():  # x, y, x, y
                draw.line(line, fill=255)
        picture = picture.reduce(2).point([min(255, 2 * value) for value in range(256)])
        rows, columns = np.mgrid[: self.side, : self.side] + 0.5
        pixels = np.asarray(picture)
        for disc in drawing.discs:
            inside = RADIUS + 0.5 - np.abs(columns + 1j * rows - disc)  # the edge is a pixel wide
            pixels = np.maximum(pixels, np.clip(255 * inside, 0, 255).astype(np.uint8))
        return Image.fromarray(pixels).convert("RGB"), drawing.label


class Canvas:
    """Paths that are drawn so far on a square image of `side` pixels."""

    def __init__(self, side: int) -> None:
        self.side = side
        self.paths: list[np.ndarray] = []
        self.points = np.empty(0, complex)  # both ends and the middle of each dash

    def add_paths(self, rng: np.random.Generator, starts: np.ndarray, dashes: int) -> bool:
        """Adds paths of so many dashes that grow by turns; adds none if one of them finds no room.

        `starts`, (paths, trials, 2), are tried in order with random directions.
        """
        count, trials, _ = starts.shape
        angles = 2 * np.pi * rng.random((count, trials))
        pivots = starts @ (1, 1j) - GAP / 2 * np.exp(1j * angles)  # half a gap before the next dash
        paths: list[list[np.ndarray]] = [[] for _ in starts]
        for step in range(dashes):
            if step:
                radius, direction = rng.random((2, count, trials))
                angles = angles + np.arcsin(np.sqrt(radius) * np.cos(2 * np.pi * direction))  # density cos^2
            steps = np.exp(1j * angles)[:, :, None] * (GAP / 2 + LENGTH * np.array([0, 0.5, 1]))
            for i, path in enumerate(paths):
                dash = pivots[i, :, None] + steps[i]  # (trials, 3)
                others = [self.points, *(part for p in paths for part in (p[:-1] if p is path else p))]
                apart = np.abs(dash[:, :, None] - np.concatenate(others)) >= APART
                inside = np.abs(dash.view(float) - self.side / 2) <= self.side / 2 - BORDER
                fits = np.flatnonzero(apart.all((1, 2)) & inside.all(1))
                if not len(fits):
                    return False
                path.append(dash[fits[0]])
                angles[i] = angles[i, fits[0]]
                pivots[i] = dash[fits[0], 2] + GAP / 2 * np.exp(1j * angles[i])
        self.points = np.concatenate([self.points, *(part for path in paths for part in path)])
        self.paths += [np.stack(path)[:, ::2].copy() for path in paths]
        return True
