"""Augmentation of a batch on its device: policy and colour jitter on bytes, random erasing on normalised images.

Loaders crop and flip before it; the trainer applies mixup and cutmix after it (`TrainState.backward`). How an image is
augmented depends on (seed, epoch, view) alone, not on its batch.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch
from timm.data.random_erasing import RandomErasing

from ..rng import ERASE, JITTER, seeded, uniform
from . import ops
from .policy import Policy

if TYPE_CHECKING:
    from ..loaders.config import LoaderConfig

JITTERS = ("Brightness", "Contrast", "Color")


class Augmentation:
    """The augmentation of a loader's batches."""

    def __init__(self, config: "LoaderConfig"):
        self.seed, self.device, training = config.seed, torch.device(config.device), config.training
        policy = config.auto_augment if training else None
        self.policy = Policy(policy, config.mean) if policy else None
        # Off beside a policy other than 3-Augment, as in timm.
        self.jitter = config.color_jitter if training and (not policy or "3a" in policy) else 0.0
        self.erasing = None
        if training and config.erase:
            self.erasing = RandomErasing(config.erase, mode="pixel", device=str(self.device))

    def augment_bytes(self, images: torch.Tensor, epoch: int, views: np.ndarray) -> torch.Tensor:
        """Applies the policy, then the colour jitter, to `images` (B, 3, H, W), uint8 on the device, in place."""
        if self.policy:
            for step in self.policy.plan(self.seed, epoch, views):
                self._apply(images, *step)
        if self.jitter:
            factors, order = jitter(self.jitter, self.seed, epoch, views)
            for kinds in order.T:
                for kind, name in enumerate(JITTERS):
                    rows = np.flatnonzero(kinds == kind)
                    self._apply(images, name, rows, factors[rows, kind])
        return images

    def erase(self, images: torch.Tensor, epoch: int, views: np.ndarray) -> torch.Tensor:
        """timm's random erasing of `images` (B, 3, H, W), normalised, in place: normal noise in every pixel."""
        if self.erasing is None:
            return images
        seeds = (uniform(self.seed, epoch, views, 1, ERASE)[:, 0] * 2**53).astype(np.int64).tolist()
        noise = torch.default_generator
        if self.device.type == "cuda":
            noise = torch.cuda.default_generators[self.device.index or 0]
        for image, seed in zip(images, seeds):
            with seeded(seed, noise):
                self.erasing(image)
        return images

    def _apply(self, images: torch.Tensor, name: str, rows: np.ndarray, arguments: np.ndarray | None) -> None:
        if len(rows) == 0:
            return
        index = torch.from_numpy(rows).to(self.device, non_blocking=True)
        if arguments is not None:
            arguments = torch.from_numpy(arguments).to(self.device, torch.float32, non_blocking=True)
        images[index] = ops.apply(name, images[index], arguments, self.policy.fill if self.policy else ())


def jitter(strength: float, seed: int, epoch: int, views: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A random colour jitter as of torchvision: factors uniform in 1 +- strength, in a random order.

    Returns factors (B, 3) of brightness, contrast and saturation, and the order (B, 3) in which they are applied.
    """
    uniforms = uniform(seed, epoch, views, 6, JITTER)
    return 1 + strength * (2 * uniforms[:, :3] - 1), uniforms[:, 3:].argsort(axis=1)
