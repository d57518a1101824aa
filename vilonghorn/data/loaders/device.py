"""The end of a batch's way: to its device as bytes, augmented and normalised there, in channels-last order.

To a GPU, batch i + 1 goes on a stream of its own before batch i is handed out, so that its copy and its augmentation
run while the model works on batch i.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from ..augment import Augmentation
from .settings import LoaderSettings

Batch = tuple[torch.Tensor, torch.Tensor]


class DeviceStage:
    """Takes batches of bytes to batches for a model.

    Args:
        settings: of the loader.
    """

    def __init__(self, settings: LoaderSettings):
        self.batch_size, self.device = settings.batch_size, settings.device
        self.augmentation = Augmentation(settings)
        mean, std = (torch.tensor(values, dtype=torch.float64) for values in (settings.mean, settings.std))
        self._factor = (1 / (255 * std)).to(self.device, torch.float32)
        self._shift = (-mean / std).to(self.device, torch.float32)
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def finished(self, batches: Iterator[Batch], epoch: int, views: np.ndarray) -> Iterator[Batch]:
        """Batches on the device.

        Args:
            batches: images (B, 3, H, W) uint8, valid until the next is asked for, and targets (B,).
            epoch: the epoch.
            views: (N,) of all batches, in their order.

        Yields:
            images (B, 3, H, W) float32, channels last, and targets (B,), the caller's own.
        """
        parts = (views[at : at + self.batch_size] for at in range(0, len(views), self.batch_size))
        made = (self._made(*batch, epoch, part) for batch, part in zip(batches, parts))
        return made if self._stream is None else self._ahead(made)

    def _made(self, images: torch.Tensor, targets: torch.Tensor, epoch: int, views: np.ndarray) -> Batch:
        if self._stream is None:
            moved = images.to(self.device, copy=self.augmentation.changes_bytes)
            return self._augmented(moved, epoch, views), targets.to(self.device)
        # The pinned copies are private, so that the source may be overwritten while they are on their way.
        pinned = images.pin_memory(), targets.pin_memory()
        with torch.cuda.stream(self._stream):
            images, targets = (tensor.to(self.device, non_blocking=True) for tensor in pinned)
            return self._augmented(images, epoch, views), targets

    def _ahead(self, made: Iterator[Batch]) -> Iterator[Batch]:
        batch = next(made, None)
        while batch is not None:
            images, targets = batch
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(self._stream)
            for tensor in batch:
                tensor.record_stream(current)
            batch = next(made, None)
            yield images, targets

    def _augmented(self, images: torch.Tensor, epoch: int, views: np.ndarray) -> torch.Tensor:
        images = self.augmentation.on_bytes(images, epoch, views)
        return self.augmentation.erase(self._normalized(images), epoch, views)

    def _normalized(self, images: torch.Tensor) -> torch.Tensor:
        """As float32, in channels-last order; a row at a time, because a loop over three channels is slow."""
        n, channels, height, width = images.shape
        rows = images.permute(0, 2, 3, 1).to(torch.float32, memory_format=torch.contiguous_format)
        rows = rows.view(n, height, width * channels)
        torch.addcmul(self._shift.repeat(width), rows, self._factor.repeat(width), out=rows)
        return rows.view(n, height, width, channels).permute(0, 3, 1, 2)
