"""The base class of loaders, and the loader of an image folder.

A loader chooses the samples of an epoch and of a rank, and augments a batch on its device.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import closing, nullcontext
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from timm.data import create_transform
from torch.utils.data import DataLoader, Dataset, default_collate

from ..augment import Augmentation
from ..beton.format import Beton
from ..image_file import explain_resize, printable
from ..image_folder import ImageFolder
from ..rng import sample_of, seeded, training_order, uniform
from .config import LoaderConfig
from .processes import ignore_signals, read_batches

Batch = tuple[torch.Tensor, torch.Tensor]


class Loader(ABC):
    """Batches of a dataset, epoch by epoch.

    Order and augmentation depend only on (seed, epoch, sample), so `epoch(e, start=k)` gives exactly what `epoch(e)`
    gives after its first k batches, for any number of workers. Epochs may overlap, and may be left early.

    On several ranks, batch b of all of them together is batch b of one rank with their batch sizes added up. Held-out
    samples are distributed without padding: each is measured once, and some ranks have a sample less.

    Attributes:
        num_samples: samples in the dataset.
        num_classes: number of class names, without them the largest label plus one; 0 without labels.
        class_names: names by label, or None.
        batch_size: samples in a batch of one rank.
        targets: what is given with the images, the labels if not changed by `set_targets`.
        fingerprint: changes with the dataset: of a `.beton` the digest of its tables, of a folder that of its names.
        content: changes with the images: of a `.beton` the digest of its checksums, of a folder that of its files; None
            without checksums, or if no `ImageCheck` has read the files.
    """

    def __init__(self, data: ImageFolder | Beton, config: LoaderConfig):
        self.data, self.config = data, config
        self.num_samples = len(data.labels)
        self.num_classes, self.class_names = (data.num_classes, data.classes) if config.labelled else (0, None)
        self.batch_size = config.batch_size
        self.fingerprint, self.content = data.digest, data.content
        self.targets: Any = data.labels if config.labelled else np.zeros_like(data.labels)
        global_batch = config.batch_size * config.world_size
        if config.training and self.num_samples < global_batch:
            ranks = f" on each of {config.world_size} ranks" if config.world_size > 1 else ""
            few = f"its {self.num_samples} images do not fill a batch of {self.batch_size}{ranks}"
            raise ValueError(f"{data.path}: {few}: lower batch_size")
        used = self.num_samples // global_batch * global_batch if config.training else self.num_samples
        self._of_rank = slice(config.rank, used, config.world_size)
        self._augmentation = Augmentation(config)
        self._device = config.device
        mean, std = (torch.tensor(values, dtype=torch.float64) for values in (config.mean, config.std))
        self._factor = (1 / (255 * std)).to(self._device, torch.float32)
        self._shift = (-mean / std).to(self._device, torch.float32)
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    def __len__(self) -> int:
        """Batches in an epoch of one rank."""
        return -(-len(range(self.num_samples)[self._of_rank]) // self.batch_size)

    @property
    def sample_names(self) -> list[str] | None:
        """The files of an image folder, relative to it and printable, by sample index; None for a `.beton`."""
        return [*map(printable, self.data.names)] if isinstance(self.data, ImageFolder) else None

    def set_targets(self, targets: Any) -> None:
        """Replaces the labels: `targets[samples]`, of sample indices (B,), returns what is given, an array (B, ...)."""
        self.targets = targets

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Iterates over the batches of one epoch.

        Args:
            epoch: decides order and augmentation when training.
            start: batches to skip, as after a resume; 0 or more.

        Yields:
            images (B, 3, H, W) float32, normalised, in channels-last order, and targets (B,) int64, both on the device.
            Later batches do not overwrite them.

        Raises ValueError if `epoch` or `start` is negative, or a sample cannot be decoded.
        """
        if epoch < 0 or start < 0:
            raise ValueError(f"epoch is {epoch} and start is {start}; expected 0 or more")
        config, size, views = self.config, self.batch_size, np.arange(self.num_samples)
        if config.training:
            views = training_order(self.num_samples, config.seed, epoch, config.repeats)
        views = views[self._of_rank]
        parts = [views[at : at + size] for at in range(start * size, len(views), size)]
        with closing(self._read(epoch, parts)) as batches:
            numbered = enumerate(zip(batches, parts), start)
            made = (self._on_device(batch, epoch, number, part) for number, (batch, part) in numbered)
            yield from made if self._stream is None else self._one_ahead(made)

    @abstractmethod
    def _read(self, epoch: int, batches: list[np.ndarray]) -> Iterator[Batch]:
        """Yields new images (B, 3, H, W) uint8, of any strides, and targets (B,) int64 of batches of views (`rng`)."""

    def _on_device(self, batch: Batch, epoch: int, number: int, views: np.ndarray) -> Batch:
        if self._stream is not None:
            batch = batch[0].pin_memory(), batch[1].pin_memory()
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            images, targets = (tensor.to(self._device, non_blocking=True) for tensor in batch)
            images = self._augmentation.augment_bytes(images, epoch, views)
            images = self._augmentation.erase(self._normalized(images), epoch, views)
            return self._resized(images, epoch, number), targets

    def _resized(self, images: torch.Tensor, epoch: int, number: int) -> torch.Tensor:
        """The images at the size that is drawn for batch `number`, the same on all ranks."""
        config = self.config
        if not (config.training and config.sizes):
            return images
        size = int(np.random.default_rng([config.seed, epoch, number]).choice(config.sizes))
        return images if size == images.shape[-1] else F.interpolate(images, size, mode="bilinear", antialias=True)

    def _one_ahead(self, made: Iterator[Batch]) -> Iterator[Batch]:
        """Makes batch i + 1 on a stream of its own before batch i is yielded, so that it overlaps the model's work."""
        batch = next(made, None)
        while batch is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            for tensor in batch:
                tensor.record_stream(current)
            ready, batch = batch, next(made, None)
            yield ready

    def _normalized(self, images: torch.Tensor) -> torch.Tensor:
        """Float32 in channels-last order; row by row, because a loop over three channels is slow."""
        n, channels, height, width = images.shape
        rows = images.permute(0, 2, 3, 1).to(torch.float32, memory_format=torch.contiguous_format)
        rows = rows.view(n, height, width * channels)
        torch.addcmul(self._shift.repeat(width), rows, self._factor.repeat(width), out=rows)
        return rows.view(n, height, width, channels).permute(0, 3, 1, 2)


class FolderLoader(Loader):
    """Batches of an image folder: timm's transforms in the workers of a torch DataLoader, without FFCV, slower."""

    def _read(self, epoch: int, batches: list[np.ndarray]) -> Iterator[Batch]:
        samples, sampler = SeededDataset(self.data, self.config, epoch), [views.tolist() for views in batches]
        options = {"num_workers": self.config.workers, "collate_fn": _collate, "worker_init_fn": ignore_signals}
        options["pin_memory"] = self.config.device.type == "cuda"
        options["generator"] = torch.Generator()  # the default would draw from torch's global generator
        loader = DataLoader(samples, batch_sampler=sampler, **options)
        with closing(read_batches(loader, str(self.data.path))) as read:
            for views, images in zip(batches, read):
                if isinstance(images, Exception):
                    raise images
                yield images, torch.from_numpy(self.targets[sample_of(views)])


def _collate(samples: list[torch.Tensor | Exception]) -> torch.Tensor | Exception:
    return next((sample for sample in samples if isinstance(sample, Exception)), None) or default_collate(samples)


class SeededDataset(Dataset):
    """Images (3, H, W) uint8 of an epoch by view, cropped and flipped by timm; or the error of reading one."""

    def __init__(self, folder: ImageFolder, config: LoaderConfig, epoch: int):
        self.folder, self.seed, self.epoch = folder, config.seed, epoch
        names = "scale", "ratio", "hflip", "crop_pct", "crop_mode", "mean"  # the mean is the colour of borders
        options = {name: getattr(config, name) for name in names} | {"is_training": config.training}
        options["interpolation"] = "box" if config.interpolation == "area" else config.interpolation
        # With use_prefetcher, images stay uint8. They are normalised on the device.
        self.transform = create_transform(config.size_at(epoch), color_jitter=None, use_prefetcher=True, **options)

    def __getitem__(self, view: int) -> torch.Tensor | Exception:
        index = sample_of(view)
        seed = int(uniform(self.seed, self.epoch, np.array([view]), 1)[0, 0] * 2**32)
        try:
            image, _ = self.folder[index]
            with explain_resize(self.folder.paths[index], image), seeded(seed):
                return torch.as_tensor(self.transform(image))
        except ValueError as error:  # returned: one that a worker raises has its traceback in its message
            return ValueError(f"sample {index}: {error}")
        except OSError as error:
            return error
