"""Augmentation of a batch on its device: policy and colour jitter on bytes, erasing on normalised pixels.

Crops and flips are done before, in the loaders, and mixup and cutmix after, by the trainer. What happens to an image
depends on (seed, epoch, view) alone, not on its batch.
"""

from __future__ import annotations

import random

import numpy as np
import torch
from timm.data.random_erasing import RandomErasing

from ..loaders.settings import LoaderSettings
from ..rng import ERASE, JITTER, uniform
from . import ops as pixels

JITTERS = (pixels.brightness, pixels.contrast, pixels.saturation)


class Augmentation:
    """The augmentation of a loader's batches.

    Args:
        settings: of the loader.
    """

    def __init__(self, settings: LoaderSettings):
        self.seed, self.device, training = settings.seed, settings.device, settings.training
        self.policy = settings.policy()
        # Colour jitter gives way to a policy, unless that is 3-Augment: as in timm.
        alone = self.policy is None or "3a" in settings.auto_augment
        self.jitter = settings.color_jitter if training and alone else 0.0
        self.erasing = None
        if training and settings.erase:
            self.erasing = RandomErasing(settings.erase, mode="pixel", device=str(settings.device))

    @property
    def changes_bytes(self) -> bool:
        """Whether `on_bytes` does anything."""
        return self.policy is not None or self.jitter > 0

    def on_bytes(self, images: torch.Tensor, epoch: int, views: np.ndarray) -> torch.Tensor:
        """The policy, then the colour jitter.

        Args:
            images: (B, 3, H, W) uint8 on the device; changed in place.
            epoch: the epoch.
            views: (B,) what the batch shows.

        Returns:
            The images.
        """
        if self.policy:
            for step in self.policy.plan(self.seed, epoch, views):
                arguments = None if step.arguments is None else self._moved(step.arguments).float()
                self._at(images, step.rows, lambda some: pixels.apply(step.name, some, arguments, self.policy.fill))
        if self.jitter:
            factors, order = jitter(self.jitter, self.seed, epoch, views)
            factors = self._moved(factors).float().view(-1, 3, 1, 1, 1)
            for turn in order.T:
                for kind, adjust in enumerate(JITTERS):
                    rows = np.flatnonzero(turn == kind)
                    self._at(images, rows, lambda some: adjust(some, factors[self._moved(rows), kind]))
        return images

    def erase(self, images: torch.Tensor, epoch: int, views: np.ndarray) -> torch.Tensor:
        """Random erasing (timm's, of normal noise in every pixel).

        Args:
            images: (B, 3, H, W) float, normalised; changed in place.
            epoch: the epoch.
            views: (B,) what the batch shows.

        Returns:
            The images.
        """
        if self.erasing is None:
            return images
        seeds = (uniform(self.seed, epoch, views, 1, ERASE)[:, 0] * 2**53).astype(np.int64).tolist()
        noise = torch.default_generator
        if self.device.type == "cuda":
            noise = torch.cuda.default_generators[self.device.index or 0]
        states = random.getstate(), noise.get_state()
        try:
            for image, seed in zip(images, seeds):  # timm draws from the global generators
                random.seed(seed)
                noise.manual_seed(seed)
                self.erasing(image)
        finally:
            random.setstate(states[0])
            noise.set_state(states[1])
        return images

    def _at(self, images, rows, function) -> None:
        if len(rows) > 0:
            rows = self._moved(rows)
            images[rows] = function(images[rows])

    def _moved(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device, non_blocking=True)


def jitter(strength: float, seed: int, epoch: int, views: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Draws a colour jitter, by torchvision's law: factors uniform in 1 +- strength, applied in a random order.

    Returns:
        factors (B, 3) of brightness, contrast and saturation, and order (B, 3), which of them comes when.
    """
    draws = uniform(seed, epoch, views, 6, JITTER)
    return 1 + strength * (2 * draws[:, :3] - 1), draws[:, 3:].argsort(axis=1)
