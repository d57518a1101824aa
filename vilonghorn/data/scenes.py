"""Scenes composed of the embedded digits, with boxes and masks: a task for detectors and segmentation with no download.

What a detector or a decoder makes of them is the examples' affair (docs/examples).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageFilter
from torch import Tensor
from torch.utils.data import Dataset

from .digits import held_out

CLASSES = tuple("0123456789")
SIZES = (28, 48)  # pixels of a digit's square, of which the ink fills a part
INK = 0.35  # of full ink: what is darker belongs to the digit
TRIES = 40  # places that are tried for a digit before it is left out


class Scene(NamedTuple):
    """An image and what is on it: n digits, n at least 1.

    Args:
        image: (3, side, side) float32 from 0 to 1.
        boxes: (n, 4) float32, left, top, right, bottom of the ink, in pixels.
        labels: (n,) int64, the digits.
        masks: (n, side, side) bool, the ink.
    """

    image: Tensor
    boxes: Tensor
    labels: Tensor
    masks: Tensor

    def semantic(self) -> Tensor:
        """(side, side) int64, the class of every pixel: 0 where there is no digit, else 1 + the digit."""
        return ((1 + self.labels)[:, None, None] * self.masks).sum(0)


class DigitScenes(Dataset):
    """Scenes of scikit-learn's handwritten digits, each in its own size and colour, none over another.

    Scene i is the same whenever and in whatever process it is asked for.
    """

    def __init__(self, count: int, side: int = 96, train: bool = True, most: int = 3, seed: int = 0) -> None:
        """
        Args:
            count: number of scenes.
            side: height and width of a scene, in pixels.
            train: of the digits that are trained on; False: of those that are held out, which no training scene shows.
            most: digits on a scene, at most; at least there is one.
            seed: another one gives other scenes.

        Raises:
            ImportError: scikit-learn is not installed.
            ValueError: a side on which the largest digit has no place.
        """
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise ImportError("the embedded digits come with scikit-learn; run: pip install scikit-learn") from error
        if side < SIZES[1]:
            raise ValueError(f"side is {side}, expected at least {SIZES[1]} pixels, the size of a digit")
        digits = load_digits()
        chosen = held_out(digits.target) != train
        self.digits, self.labels = digits.images[chosen] / 16, digits.target[chosen]
        self.count, self.side, self.most, self.key = count, side, most, (seed, train)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Scene:
        """Scene `index`, counted from 0.

        Raises:
            IndexError: there is no such scene.
        """
        if not 0 <= index < self.count:
            raise IndexError(f"scene {index} of {self.count}")
        draw = np.random.default_rng((*self.key, index))
        image = self._background(draw)
        taken = np.zeros((self.side, self.side), bool)
        masks, labels = [], []
        for _ in range(draw.integers(1, self.most + 1)):
            number = draw.integers(len(self.labels))
            size = int(draw.integers(SIZES[0], SIZES[1] + 1))
            ink = _enlarged(self.digits[number], size)
            place = self._free_place(draw, taken, size)
            if place is None:
                continue
            whole = np.zeros_like(taken, np.float32)
            whole[place] = ink
            taken[place] = True
            image += whole[..., None] * (draw.uniform(0.55, 1, 3) - image)
            masks.append(whole > INK)
            labels.append(self.labels[number])
        image += draw.normal(0, 0.03, image.shape)
        boxes = [[x.min(), y.min(), x.max() + 1, y.max() + 1] for y, x in map(np.nonzero, masks)]
        return Scene(
            torch.from_numpy(image.clip(0, 1).transpose(2, 0, 1)).float().contiguous(),
            torch.tensor(boxes, dtype=torch.float32),
            torch.tensor(labels, dtype=torch.int64),
            torch.from_numpy(np.stack(masks)),
        )

    def _background(self, draw: np.random.Generator) -> np.ndarray:
        """Dark clouds: (side, side, 3)."""
        clouds = Image.fromarray(draw.integers(0, 110, (6, 6, 3), dtype=np.uint8))
        clouds = clouds.resize((self.side, self.side), Image.Resampling.BICUBIC).filter(ImageFilter.GaussianBlur(1))
        return np.asarray(clouds, np.float64) / 255

    def _free_place(self, draw: np.random.Generator, taken: np.ndarray, size: int) -> tuple[slice, slice] | None:
        for _ in range(TRIES):
            top, left = draw.integers(0, self.side - size + 1, 2)
            place = slice(top, top + size), slice(left, left + size)
            if not taken[place].any():
                return place
        return None


def _enlarged(digit: np.ndarray, size: int) -> np.ndarray:
    """Ink of 8 x 8 pixels from 0 to 1, on size x size."""
    small = Image.fromarray(digit.astype(np.float32))
    return np.asarray(small.resize((size, size), Image.Resampling.BICUBIC)).clip(0, 1)
