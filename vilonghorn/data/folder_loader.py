"""The loader over an image folder: timm's transforms in the worker processes of a torch DataLoader.

For those without FFCV, and for a first run with no conversion. Slower than a `.beton`, and bicubic where FFCV averages.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import torch
from timm.data import create_transform
from torch.utils.data import DataLoader, Dataset, default_collate

from .base import Loader, LoaderSettings
from .crops import uniform
from .images import ImageFolder


class FolderLoader(Loader):
    """Batches of an image folder.

    Args:
        folder: the images.
        settings: of the batches; `workers` is a number of processes, 0 reads in this one.
    """

    def __init__(self, folder: ImageFolder, settings: LoaderSettings):
        super().__init__(settings, folder.labels, folder.classes, str(folder.root))
        transform = create_transform(
            settings.image_size,
            is_training=settings.training,
            scale=settings.scale,
            ratio=settings.ratio,
            hflip=settings.hflip,
            color_jitter=None,
            interpolation="bicubic",
            crop_pct=settings.crop_pct,
            use_prefetcher=True,  # leaves uint8, which `Loader` normalises on the device
        )
        self._dataset = SeededDataset(folder, transform, settings.seed)

    def _read(self, epoch: int, order: np.ndarray) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        keys = [(epoch, index) for index in order.tolist()]
        batches = [keys[i : i + self.batch_size] for i in range(0, len(keys), self.batch_size)]
        # A bad sample comes as its batch: an exception in a worker would arrive with a traceback in its message.
        for batch in DataLoader(
            self._dataset,
            batch_sampler=batches,
            num_workers=self.settings.workers,
            collate_fn=_collate,
            pin_memory=self.settings.device.type == "cuda",
            # Seeds the workers, whose draws the dataset seeds anew; the default would draw from torch's own generator.
            generator=torch.Generator(),
        ):
            if isinstance(batch, ValueError):
                raise batch
            yield batch


def _collate(samples: list) -> tuple[torch.Tensor, torch.Tensor] | ValueError:
    bad = [sample for sample in samples if isinstance(sample, ValueError)]
    return bad[0] if bad else default_collate(samples)


class SeededDataset(Dataset):
    """(uint8 image, label) by key (epoch, index), or the error that reading it gave.

    Every draw of the transform depends on the seed and the key alone.

    Args:
        folder: the images.
        transform: from a PIL image to (3, H, W); may draw from `random` and from torch's and numpy's generators.
        seed: of the draws.
    """

    def __init__(self, folder: ImageFolder, transform: Callable, seed: int):
        self.folder, self.transform, self.seed = folder, transform, seed

    def __getitem__(self, key: tuple[int, int]) -> tuple[torch.Tensor, int] | ValueError:
        epoch, index = key
        try:
            image, label = self.folder[index]
        except ValueError as error:
            return ValueError(f"sample {index}: {error}")
        states = random.getstate(), np.random.get_state(), torch.get_rng_state()
        draw = int(uniform(self.seed, epoch, np.array([index]), 1)[0, 0] * 2**32)
        random.seed(draw)
        np.random.seed(draw)
        torch.default_generator.manual_seed(draw)
        try:
            return torch.as_tensor(self.transform(image)), label
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.set_rng_state(states[2])
