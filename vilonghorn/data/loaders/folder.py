"""The loader of an image folder: timm's transforms in the worker processes of a torch DataLoader.

It needs no FFCV and no conversion, and is slower than the loader of a `.beton`.
"""

import hashlib
import os
import random
import signal
from collections.abc import Iterator

import numpy as np
import torch
from timm.data import create_transform
from torch.utils.data import DataLoader, Dataset, default_collate

from ..images import ImageFolder
from ..rng import global_rng_kept, sample_of, uniform
from .config import LoaderConfig
from .loader import Batch, Loader


class FolderLoader(Loader):
    """Batches of an image folder. `config.workers` is a number of processes; 0 reads in this one."""

    def __init__(self, folder: ImageFolder, config: LoaderConfig):
        names = "\n".join(os.path.relpath(path, folder.root) for path in folder.paths)
        fingerprint = hashlib.sha256(names.encode(errors="surrogateescape")).hexdigest()
        super().__init__(config, folder.labels, folder.classes, str(folder.root), fingerprint)
        self._folder = folder

    def _read(self, epoch: int, batches: list[np.ndarray]) -> Iterator[Batch]:
        # An unreadable sample is returned in place of its batch: a worker's exception would carry its traceback.
        for batch in DataLoader(
            SeededDataset(self._folder, self.config, epoch),
            batch_sampler=[views.tolist() for views in batches],
            num_workers=self.config.workers,
            collate_fn=_collate,
            worker_init_fn=_ignore_signals,
            pin_memory=self.config.device.type == "cuda",
            generator=torch.Generator(),  # the default would draw from torch's global generator
        ):
            if isinstance(batch, ValueError):
                raise batch
            yield batch


def _ignore_signals(worker: int) -> None:
    """Ignores requests to stop: the training process finishes its update first, and needs the batch."""
    for name in ("SIGINT", "SIGTERM", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def _collate(samples: list) -> Batch | ValueError:
    bad = [sample for sample in samples if isinstance(sample, ValueError)]
    return bad[0] if bad else default_collate(samples)


class SeededDataset(Dataset):
    """(uint8 image (3, H, W), label) of an epoch by view, cropped and flipped by timm, or the error of reading it."""

    def __init__(self, folder: ImageFolder, config: LoaderConfig, epoch: int):
        self.folder, self.seed, self.epoch = folder, config.seed, epoch
        self.transform = create_transform(
            config.size_at(epoch),
            is_training=config.training,
            scale=config.scale,
            ratio=config.ratio,
            hflip=config.hflip,
            color_jitter=None,
            interpolation="box" if config.interpolation == "area" else config.interpolation,
            crop_pct=config.crop_pct,
            use_prefetcher=True,  # leaves uint8, which is normalised on the device
        )

    def __getitem__(self, view: int) -> tuple[torch.Tensor, int] | ValueError:
        index = sample_of(view)
        try:
            image, label = self.folder[index]
        except ValueError as error:
            return ValueError(f"sample {index}: {error}")
        seed = int(uniform(self.seed, self.epoch, np.array([view]), 1)[0, 0] * 2**32)
        with global_rng_kept():
            random.seed(seed)
            torch.default_generator.manual_seed(seed)
            return torch.as_tensor(self.transform(image)), label
