"""Scenes made of handwritten digits, with boxes and masks: a detection and segmentation task without a download.

`python examples/scenes.py FOLDER` writes them as PNG files with a COCO file of the boxes and PNG masks.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageFilter
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.ops import box_convert
from torchvision.transforms.functional import to_pil_image

from vilonghorn.data.digits import every_fifth

CLASSES = tuple("0123456789")
SIZES = (28, 48)  # smallest and largest side of a digit's square, in pixels
INK = 0.35  # fraction of full ink above which a pixel belongs to the digit
TRIES = 40  # places that are tried for a digit before it is left out


class Scene(NamedTuple):
    """An image with n digits, n at least 1.

    Attributes:
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
        """(side, side) int64, the class of every pixel: 0 for the background, else 1 + the digit."""
        return ((1 + self.labels)[:, None, None] * self.masks).sum(0)


class DigitScenes(Dataset):
    """Scenes of scikit-learn's handwritten digits in random sizes and colours, which do not overlap.

    Scene i depends on the arguments and i alone.

    Args:
        count: number of scenes.
        side: height and width of a scene, in pixels.
        train: True for the digits that are trained on, False for those that are held out.
        most: largest number of digits in a scene.
        seed: another one gives other scenes.

    Raises:
        ValueError: `side` is smaller than the largest digit.
    """

    def __init__(self, count: int, side: int = 96, train: bool = True, most: int = 3, seed: int = 0) -> None:
        if side < SIZES[1]:
            raise ValueError(f"side is {side}, expected at least {SIZES[1]} pixels, the size of a digit")
        digits = load_digits()
        chosen = every_fifth(digits.target, 4) != train
        self.digits, self.labels = digits.images[chosen] / 16, digits.target[chosen]
        self.count, self.side, self.most, self.key = count, side, most, (seed, train)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Scene:
        """Scene `index`, from 0. Raises IndexError beyond the last."""
        if not 0 <= index < self.count:
            raise IndexError(f"scene {index} of {self.count}")
        rng = np.random.default_rng((*self.key, index))
        image = self._background(rng)
        taken = np.zeros((self.side, self.side), bool)
        masks, labels = [], []
        for _ in range(rng.integers(1, self.most + 1)):
            number = rng.integers(len(self.labels))
            size = int(rng.integers(SIZES[0], SIZES[1] + 1))
            place = self._free_place(rng, taken, size)
            if place is None:
                continue
            digit = Image.fromarray(self.digits[number].astype(np.float32))
            ink = np.zeros_like(taken, np.float32)
            ink[place] = np.asarray(digit.resize((size, size), Image.Resampling.BICUBIC)).clip(0, 1)
            taken[place] = True
            image += ink[..., None] * (rng.uniform(0.55, 1, 3) - image)
            masks.append(ink > INK)
            labels.append(self.labels[number])
        image += rng.normal(0, 0.03, image.shape)
        boxes = [[x.min(), y.min(), x.max() + 1, y.max() + 1] for y, x in map(np.nonzero, masks)]
        return Scene(
            torch.from_numpy(image.clip(0, 1).transpose(2, 0, 1)).float().contiguous(),
            torch.tensor(boxes, dtype=torch.float32),
            torch.tensor(labels, dtype=torch.int64),
            torch.from_numpy(np.stack(masks)),
        )

    def _background(self, rng: np.random.Generator) -> np.ndarray:
        """Dark clouds: (side, side, 3)."""
        clouds = Image.fromarray(rng.integers(0, 110, (6, 6, 3), dtype=np.uint8))
        clouds = clouds.resize((self.side, self.side), Image.Resampling.BICUBIC).filter(ImageFilter.GaussianBlur(1))
        return np.asarray(clouds, np.float64) / 255

    def _free_place(self, rng: np.random.Generator, taken: np.ndarray, size: int) -> tuple[slice, slice] | None:
        for _ in range(TRIES):
            top, left = rng.integers(0, self.side - size + 1, 2)
            place = slice(top, top + size), slice(left, left + size)
            if not taken[place].any():
                return place
        return None


def write(folder: Path, split: str, scenes: DigitScenes) -> None:
    """Writes images and masks (0 the background, 1 + digit) as PNG, and the boxes as a COCO file, of one split."""
    images, annotations, masks = [], [], folder / f"{split}_masks"
    (folder / split).mkdir(parents=True)
    masks.mkdir()
    for number, scene in enumerate(scenes):
        name = f"{number:05d}.png"
        to_pil_image(scene.image).save(folder / split / name)
        to_pil_image(scene.semantic().byte()).save(masks / name)
        images.append(dict(id=number, file_name=name, width=scenes.side, height=scenes.side))
        for box, label in zip(box_convert(scene.boxes, "xyxy", "xywh").tolist(), scene.labels.tolist()):
            area = box[2] * box[3]
            annotation = dict(id=len(annotations) + 1, image_id=number, category_id=label, bbox=box, area=area)
            annotations.append(annotation | dict(iscrowd=0))
    categories = [dict(id=number, name=name) for number, name in enumerate(CLASSES)]
    parts = dict(images=images, annotations=annotations, categories=categories)
    (folder / f"{split}.json").write_text(json.dumps(parts))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("folder", type=Path, help="a new folder for train, train_masks, train.json, and those of val")
    parser.add_argument("--train", type=int, default=1000, help="scenes to train on")
    parser.add_argument("--val", type=int, default=200, help="scenes of digits that are held out")
    parser.add_argument("--side", type=int, default=96, help="height and width of a scene, in pixels")
    args = parser.parse_args(argv)
    if args.folder.exists():
        parser.error(f"{args.folder} exists: name a new folder")
    for split, count in (("train", args.train), ("val", args.val)):
        write(args.folder, split, DigitScenes(count, args.side, train=split == "train"))


if __name__ == "__main__":
    main()
