"""What every loader shares: its settings, the order of an epoch, and the last step of a batch (device, normalisation).

Where the pixels come from is left to `ffcv_loader` and `folder_loader`.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

import numpy as np
import torch


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
    drop_last: bool
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
        if not 0 <= self.hflip <= 1:
            raise ValueError(f"hflip {self.hflip}: expected a probability")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} of {self.world_size}: expected 0 to {self.world_size - 1}")
        if not 0 < self.crop_pct <= 1:
            raise ValueError(f"crop_pct {self.crop_pct}: expected above 0, at most 1")


@contextmanager
def torch_threads_kept() -> Iterator[None]:
    """Restores the number of torch's threads, which FFCV sets when it is imported, made and iterated."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Loader(ABC):
    """Batches of a dataset, epoch by epoch.

    Order and augmentation depend only on (seed, epoch, sample), so `epoch(e, start=k)` gives exactly what `epoch(e)`
    gives after its first k batches, for any number of workers. Epochs may overlap, and may be left early.

    On several ranks, batch b of all of them together is batch b of one rank with their batch sizes added up. Held-out
    samples are dealt out to the ranks without padding: each is measured once, and some ranks have a sample less.

    Attributes:
        num_samples: samples in the dataset.
        num_classes: classes, from the names where there are some, else the largest label plus one.
        class_names: names by label, or None.
        batch_size: samples in a batch, of one rank.
        fingerprint: changes with labels, their order, and the names of the classes.
    """

    def __init__(self, settings: LoaderSettings, labels: np.ndarray, class_names: list[str] | None, name: str):
        self.settings = settings
        self.num_samples = len(labels)
        self.num_classes = len(class_names) if class_names is not None else int(labels.max()) + 1
        self.class_names = class_names
        self.batch_size = settings.batch_size
        names = json.dumps(class_names).encode()
        self.fingerprint = hashlib.sha256(names + np.ascontiguousarray(labels, np.int64).tobytes()).hexdigest()
        whole = settings.batch_size * settings.world_size
        used = self.num_samples // whole * whole if settings.drop_last else self.num_samples
        self._share = slice(settings.rank, used, settings.world_size)
        if used == 0:
            raise ValueError(
                f"{name}: its {self.num_samples} samples do not fill one batch of {self.batch_size}, and drop_last "
                "drops what does not; lower batch_size or set drop_last=False"
            )
        mean, std = (torch.tensor(v, dtype=torch.float64).view(1, 3, 1, 1) for v in (settings.mean, settings.std))
        self._factor = (1 / (255 * std)).to(settings.device, torch.float32)
        self._shift = (-mean / std).to(settings.device, torch.float32)
        self._copies = torch.cuda.Stream(settings.device) if settings.device.type == "cuda" else None

    def __len__(self) -> int:
        """Batches in an epoch, of this rank."""
        return -(-len(range(self.num_samples)[self._share]) // self.batch_size)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Iterates over the batches of one epoch.

        Args:
            epoch: 0 or more; decides order and augmentation when training.
            start: batches to leave out at the beginning, as after a resume; at most `len(self)`.

        Yields:
            images (B, 3, H, W) float32, normalised, and targets (B,) int64, both on the device and the caller's own.

        Raises:
            ValueError: `epoch` or `start` is out of range; while iterating: a sample cannot be decoded.
        """
        if epoch < 0:
            raise ValueError(f"epoch {epoch}: expected 0 or more")
        if not 0 <= start <= len(self):
            raise ValueError(f"start {start}: expected 0 to {len(self)}, the batches of an epoch")
        if self.settings.training:
            order = np.random.default_rng([self.settings.seed, epoch]).permutation(self.num_samples)
        else:
            order = np.arange(self.num_samples)
        return self._finished(epoch, order[self._share][start * self.batch_size :])

    def _finished(self, epoch: int, order: np.ndarray) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        if len(order) > 0:
            with closing(self._read(epoch, order)) as batches:
                for images, targets in batches:
                    yield self._normalized(self._moved(images)), self._moved(targets)

    @abstractmethod
    def _read(self, epoch: int, order: np.ndarray) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields images (B, 3, H, W) uint8, of any strides and valid until the next batch, and targets (B,) int64.

        Args:
            epoch: the epoch, for the augmentation.
            order: sample indices, not empty; consecutive `batch_size` of them make a batch.
        """

    def _normalized(self, images: torch.Tensor) -> torch.Tensor:
        # First transposed as bytes: on a CPU, converting and transposing in one call takes six times as long.
        return images.contiguous().float().mul_(self._factor).add_(self._shift)

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """On the device. A copy to a GPU has its own stream, so that waiting for it does not wait for the model."""
        if self._copies is None:
            return tensor.to(self.settings.device)
        with torch.cuda.stream(self._copies):
            moved = tensor.to(self.settings.device, non_blocking=True)
        self._copies.synchronize()  # the source is overwritten once the next batch is asked for
        moved.record_stream(torch.cuda.current_stream(self.settings.device))
        return moved
