"""The loader over an image folder: timm's transforms in the worker processes of a torch DataLoader.

For those without FFCV, and for a first run with no conversion. Slower than a `.beton`.
"""

from __future__ import annotations

import functools
import hashlib
import os
import random
import signal
from collections.abc import Callable, Iterator

import numpy as np
import torch
from timm.data import create_transform
from torch.utils.data import DataLoader, Dataset, default_collate

from ..images import ImageFolder
from ..rng import sample_of, uniform
from .base import Loader
from .settings import LoaderSettings


class FolderLoader(Loader):
    """Batches of an image folder.

    Args:
        folder: the images.
        settings: of the batches; `workers` is a number of processes, 0 reads in this one.
    """

    def __init__(self, folder: ImageFolder, settings: LoaderSettings):
        names = "\n".join(os.path.relpath(path, folder.root) for path in folder.paths)
        fingerprint = hashlib.sha256(names.encode(errors="surrogateescape")).hexdigest()
        super().__init__(settings, folder.labels, folder.classes, str(folder.root), fingerprint)
        self._dataset = SeededDataset(folder, functools.partial(_transform, settings), settings)

    def _read(self, epoch: int, views: np.ndarray) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        keys = [(epoch, view) for view in views.tolist()]
        batches = [keys[i : i + self.batch_size] for i in range(0, len(keys), self.batch_size)]
        # A bad sample comes as its batch: an exception in a worker would arrive with a traceback in its message.
        for batch in DataLoader(
            self._dataset,
            batch_sampler=batches,
            num_workers=self.settings.workers,
            collate_fn=_collate,
            worker_init_fn=_leave_signals,
            pin_memory=self.settings.device.type == "cuda",
            # Seeds the workers, whose draws the dataset seeds anew; the default would draw from torch's own generator.
            generator=torch.Generator(),
        ):
            if isinstance(batch, ValueError):
                raise batch
            yield batch


def _transform(settings: LoaderSettings, size: tuple[int, int]) -> Callable:
    """timm's crop and flip, from a PIL image to uint8 (3, H, W); the rest of the augmentation is done on the batch."""
    return create_transform(
        size,
        is_training=settings.training,
        scale=settings.scale,
        ratio=settings.ratio,
        hflip=settings.hflip,
        color_jitter=None,
        interpolation={"area": "box"}.get(settings.interpolation, settings.interpolation),
        crop_pct=settings.crop_pct,
        use_prefetcher=True,  # leaves uint8, which is normalised on the device
    )


def _leave_signals(worker: int) -> None:
    """Ignores what asks the job to stop: the process that trains finishes its update first, and needs its batches."""
    for name in ("SIGINT", "SIGTERM", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def _collate(samples: list) -> tuple[torch.Tensor, torch.Tensor] | ValueError:
    bad = [sample for sample in samples if isinstance(sample, ValueError)]
    return bad[0] if bad else default_collate(samples)


class SeededDataset(Dataset):
    """(uint8 image, label) by key (epoch, view), or the error that reading it gave.

    Every draw of the transform depends on the seed and the key alone.

    Args:
        folder: the images.
        transform: from a size (height, width) to the transform of a PIL image to (3, H, W), which may draw from
            `random` and from torch's and numpy's generators.
        settings: seed, and the size of an epoch's images.
    """

    def __init__(self, folder: ImageFolder, transform: Callable, settings: LoaderSettings):
        self.folder, self.transform, self.settings = folder, transform, settings
        self.transforms: dict[tuple[int, int], Callable] = {}

    def __getitem__(self, key: tuple[int, int]) -> tuple[torch.Tensor, int] | ValueError:
        epoch, view = key
        index = sample_of(view)
        try:
            image, label = self.folder[index]
        except ValueError as error:
            return ValueError(f"sample {index}: {error}")
        states = random.getstate(), np.random.get_state(), torch.get_rng_state()
        draw = int(uniform(self.settings.seed, epoch, np.array([view]), 1)[0, 0] * 2**32)
        random.seed(draw)
        np.random.seed(draw)
        torch.default_generator.manual_seed(draw)
        try:
            size = self.settings.size_at(epoch)
            if size not in self.transforms:
                self.transforms[size] = self.transform(size)
            return torch.as_tensor(self.transforms[size](image)), label
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.set_rng_state(states[2])
