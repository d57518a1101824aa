"""What every loader shares: the samples of an epoch and of a rank, and the end of a batch's way, on its device.

Where the pixels come from is left to `ffcv_loader` and `folder_loader`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import closing, contextmanager

import numpy as np
import torch

from ..rng import training_order
from .device import DeviceStage
from .settings import LoaderSettings


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
        fingerprint: changes with the dataset: of a `.beton` the digest of its tables, of a folder that of its names.
    """

    def __init__(
        self, settings: LoaderSettings, labels: np.ndarray, class_names: list[str] | None, name: str, fingerprint: str
    ):
        self.settings = settings
        self.num_samples = len(labels)
        self.num_classes = len(class_names) if class_names is not None else int(labels.max()) + 1
        self.class_names = class_names
        self.batch_size = settings.batch_size
        self.fingerprint = fingerprint
        whole = settings.batch_size * settings.world_size
        if settings.drop_last and self.num_samples < whole:
            ranks = f" on each of {settings.world_size} ranks" if settings.world_size > 1 else ""
            raise ValueError(
                f"{name}: its {self.num_samples} samples do not fill one batch of {self.batch_size}{ranks}, and "
                "drop_last drops what does not; lower batch_size or set drop_last=False"
            )
        used = self.num_samples // whole * whole if settings.drop_last else self.num_samples
        self._share = slice(settings.rank, used, settings.world_size)
        self._stage = DeviceStage(settings)

    def __len__(self) -> int:
        """Batches in an epoch, of one rank."""
        return -(-len(range(self.num_samples)[self._share]) // self.batch_size)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Iterates over the batches of one epoch.

        Args:
            epoch: 0 or more; decides order and augmentation when training.
            start: batches to leave out at the beginning, as after a resume; at most `len(self)`.

        Yields:
            images (B, 3, H, W) float32, normalised, in channels-last order, and targets (B,) int64, both on the device
            and the caller's own.

        Raises:
            ValueError: `epoch` or `start` is out of range; while iterating: a sample cannot be decoded.
        """
        if epoch < 0:
            raise ValueError(f"epoch {epoch}: expected 0 or more")
        if not 0 <= start <= len(self):
            raise ValueError(f"start {start}: expected 0 to {len(self)}, the batches of an epoch")
        settings = self.settings
        if settings.training:
            views = training_order(self.num_samples, settings.seed, epoch, settings.repeats)
        else:
            views = np.arange(self.num_samples)
        return self._finished(epoch, views[self._share][start * self.batch_size :])

    def _finished(self, epoch: int, views: np.ndarray) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        if len(views) > 0:
            with closing(self._read(epoch, views)) as batches:
                yield from self._stage.finished(batches, epoch, views)

    @abstractmethod
    def _read(self, epoch: int, views: np.ndarray) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields images (B, 3, H, W) uint8, of any strides and valid until the next batch, and targets (B,) int64.

        Args:
            epoch: the epoch, for the augmentation and the size of the images.
            views: views of samples (see `draws`), not empty; consecutive `batch_size` of them make a batch.
        """
