"""The options of a loader, checked. `create_loader` explains them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..augment.policy import Policy

SIZE_STEP = 32  # pixels; sizes of a progressive resolution are multiples of it, as in ffcv-imagenet
INTERPOLATIONS = ("area", "bicubic")


@dataclass(frozen=True)
class LoaderSettings:
    """Options of `create_loader`, which explains them, checked."""

    batch_size: int
    image_size: tuple[int, int]
    training: bool
    seed: int
    workers: int
    device: torch.device
    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: tuple[float, float]
    ratio: tuple[float, float]
    hflip: float
    crop_pct: float
    interpolation: str
    drop_last: bool
    repeats: int
    auto_augment: str | None
    color_jitter: float
    erase: float
    start_size: int | None
    ramp: tuple[int, int]
    rank: int
    world_size: int

    def __post_init__(self):
        if self.batch_size < 1:
            raise ValueError(f"batch_size {self.batch_size}: expected at least 1")
        if len(self.image_size) != 2 or min(self.image_size) < 1:
            raise ValueError(f"image_size {self.image_size}: expected a positive number of pixels, or (height, width)")
        if self.workers < 0 or self.seed < 0:
            raise ValueError(f"workers {self.workers}, seed {self.seed}: expected 0 or more")
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise ValueError(f"mean {self.mean}, std {self.std}: expected three numbers each, std above 0")
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(f"scale {self.scale}: expected (low, high) with 0 < low <= high <= 1")
        if not 0 < self.ratio[0] <= self.ratio[1]:
            raise ValueError(f"ratio {self.ratio}: expected (low, high) with 0 < low <= high")
        for name in ("hflip", "color_jitter", "erase"):
            if not 0 <= (value := getattr(self, name)) <= 1:
                raise ValueError(f"{name} {value}: expected 0 to 1")
        if not 0 < self.crop_pct <= 1:
            raise ValueError(f"crop_pct {self.crop_pct}: expected above 0, at most 1")
        if self.interpolation not in INTERPOLATIONS:
            raise ValueError(f"interpolation {self.interpolation!r}: expected {' or '.join(INTERPOLATIONS)}")
        if not 1 <= self.repeats <= 1 << 16:
            raise ValueError(f"repeats {self.repeats}: expected at least 1")
        if self.start_size is not None and not 1 <= self.start_size <= min(self.image_size):
            raise ValueError(f"start_size {self.start_size}: expected 1 to image_size, {min(self.image_size)}")
        if len(self.ramp) != 2 or not 0 <= self.ramp[0] <= self.ramp[1]:
            raise ValueError(f"ramp {self.ramp}: expected two epochs, (first, last), with 0 <= first <= last")
        if self.start_size is not None and not self.ramp[1]:
            raise ValueError(f"start_size {self.start_size} without a ramp: expected the epochs between which it grows")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} of {self.world_size}: expected 0 to {self.world_size - 1}")
        if self.training and self.world_size > 1 and not self.drop_last:
            raise ValueError("drop_last=False in training on several ranks: they would make unequal numbers of updates")
        self.policy()

    def policy(self) -> Policy | None:
        """The policy that `auto_augment` names, where there is one."""
        return Policy(self.auto_augment, self.mean) if self.training and self.auto_augment else None

    def size_at(self, epoch: int) -> tuple[int, int]:
        """(height, width) of the images of an epoch: `image_size`, or on the way to it from `start_size`."""
        return grown_size(epoch, self.image_size, self.start_size if self.training else None, self.ramp)


def grown_size(
    epoch: int, image_size: tuple[int, int], start_size: int | None, ramp: tuple[int, int]
) -> tuple[int, int]:
    """(height, width) of the training images of an epoch, which grow from `start_size` as `create_loader` explains."""
    if start_size is None or epoch >= ramp[1]:
        return image_size
    first = tuple(round(side * start_size / min(image_size)) for side in image_size)
    if epoch <= ramp[0]:
        return first
    share = np.interp(epoch, ramp, (start_size / min(image_size), 1.0))
    steps = (round(side * share / SIZE_STEP) * SIZE_STEP for side in image_size)
    return tuple(min(side, max(least, step)) for side, least, step in zip(image_size, first, steps))
