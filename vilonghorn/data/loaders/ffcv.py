"""The loader of a `.beton`: FFCV's pipeline and prefetching thread, by subclasses of its public classes.

They correct FFCV 1.0.2: its crops are not seeded, it ignores decoder errors, it hangs when a pipeline fails or an epoch
is left early, and it changes torch's thread count, also when it is imported.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from dataclasses import replace

import numba
import numpy as np
import torch
from ffcv.fields.decoders import SimpleRGBImageDecoder
from ffcv.loader import Loader as Pipeline
from ffcv.loader.epoch_iterator import EpochIterator
from ffcv.pipeline.allocation_query import AllocationQuery
from ffcv.pipeline.operation import Operation

from ..beton.format import MODES, Beton
from ..crops import ATTEMPTS, center_crops, random_crops
from ..rng import CROP, sample_of, uniform
from .decode import decode, decode_bicubic
from .loader import Batch, Loader, torch_threads_kept
from .settings import LoaderSettings


class FFCVLoader(Loader):
    """Batches of a `.beton`. `settings.workers` is a number of decoding threads, at least 1 and at most the CPUs."""

    def __init__(self, beton: Beton, settings: LoaderSettings):
        super().__init__(settings, beton.labels, beton.classes, str(beton.path), beton.digest)
        self._labels = torch.from_numpy(beton.labels)
        threads = max(1, min(settings.workers, numba.config.NUMBA_NUM_THREADS))
        with torch_threads_kept():
            self._pipeline = Pipeline(
                str(beton.path),
                batch_size=settings.batch_size,
                num_workers=threads,
                os_cache=True,
                seed=settings.seed,
                pipelines={beton.fields[0]: [Key(), Crop(beton, settings, threads)], beton.fields[1]: None},
            )

    def _read(self, epoch: int, views: np.ndarray) -> Iterator[Batch]:
        keys = np.stack([np.full_like(views, epoch), views], axis=1)
        labels = self._labels[torch.from_numpy(sample_of(views))]
        with torch_threads_kept():
            batches = Epoch(self._pipeline, keys)
            try:
                images = batches.next_batch()  # the thread changes torch's thread count before its first batch only
            except BaseException:
                batches.stop()
                raise
        try:
            for at in range(0, len(views), self.batch_size):
                yield torch.from_numpy(images).permute(0, 3, 1, 2), labels[at : at + self.batch_size]
                if at + self.batch_size < len(views):
                    images = batches.next_batch()
        finally:
            batches.stop()


class Key(SimpleRGBImageDecoder):
    """The first step of FFCV's pipeline, which FFCV compiles: copies the keys (epoch, view) and decodes nothing."""

    def declare_state_and_memory(self, previous_state):
        """Shape and memory of the result, for FFCV."""
        shape, dtype = (2,), np.dtype(np.int64)
        return replace(previous_state, jit_mode=True, shape=shape, dtype=dtype), AllocationQuery(shape, dtype)

    def generate_code(self):
        """The function that FFCV calls for each batch."""

        def copy(keys, destination, metadata, storage_state):
            destination[: len(keys)] = keys
            return destination[: len(keys)]

        return copy


class Crop(Operation):
    """The second step: from keys to (B, H, W, 3) uint8, with a seeded random crop and flip or a centre crop."""

    def __init__(self, beton: Beton, settings: LoaderSettings, threads: int):
        super().__init__()
        self.beton, self.settings, self.threads = beton, settings, threads
        self.file = np.memmap(beton.path, np.uint8, "r")
        image = beton.images
        columns = image["data_ptr"], beton.sizes, image["height"], image["width"], image["mode"] == MODES["jpg"]
        self.samples = np.stack([column.astype(np.int64) for column in columns], axis=1)

    def declare_state_and_memory(self, previous_state):
        """Shape and memory of the result, for FFCV."""
        shape, dtype = (*self.settings.image_size, 3), np.dtype(np.uint8)
        return replace(previous_state, jit_mode=False, shape=shape, dtype=dtype), AllocationQuery(shape, dtype)

    def generate_code(self):
        """The function that FFCV calls for each batch."""
        return self.decode

    def decode(self, keys: np.ndarray, destination: np.ndarray) -> np.ndarray:
        """Decodes the samples that `keys` (B, 2) names, all of one epoch. Raises ValueError if one is damaged."""
        epoch, views = int(keys[0, 0]), keys[:, 1]
        height, width = self.settings.size_at(epoch)
        out = destination.reshape(-1)[: len(keys) * height * width * 3].reshape(len(keys), height, width, 3)
        indices = sample_of(views)
        samples = self.samples[indices]
        crops = self._crops(epoch, views, samples)
        function = decode if self.settings.interpolation == "area" else decode_bicubic
        failed = function(self.file, samples, crops, out, self.threads)
        if failed.any():
            index = int(indices[np.flatnonzero(failed)[0]])
            raise ValueError(f"{self.beton.path}: sample {index}: its JPEG data are damaged; write the file again")
        return out

    def _crops(self, epoch: int, views: np.ndarray, samples: np.ndarray) -> np.ndarray:
        heights, widths, settings = samples[:, 2], samples[:, 3], self.settings
        if settings.training:
            draws = uniform(settings.seed, epoch, views, 1 + 4 * ATTEMPTS, CROP)
            boxes = random_crops(draws[:, 1:], heights, widths, settings.scale, settings.ratio)
            flips = draws[:, :1] < settings.hflip
        else:
            boxes = center_crops(heights, widths, settings.image_size, settings.crop_pct)
            flips = np.zeros((len(views), 1), bool)
        return np.concatenate([boxes, flips], axis=1)


class Epoch(EpochIterator):
    """FFCV's prefetching thread, whose errors reach the caller, and which ends when `stop` is called."""

    error: BaseException | None = None

    def run(self):
        """Fills the queue, and keeps an error for the caller."""
        try:
            super().run()
        except BaseException as error:  # next_batch raises it in the caller's thread
            self.error = error
            while not self.terminate_event.is_set():
                try:
                    return self.output_queue.put(None, timeout=0.1)
                except queue.Full:
                    continue

    def next_batch(self) -> np.ndarray:
        """The next batch, whose memory FFCV overwrites some batches later."""
        try:
            return next(self)[0]
        except StopIteration:
            raise self.error or RuntimeError("FFCV ended an epoch before its last batch") from None

    def stop(self) -> None:
        """Ends the thread and waits for it."""
        self.close()
        while self.is_alive():
            try:
                self.output_queue.get_nowait()  # the thread may be waiting for room
            except queue.Empty:
                self.join(0.01)
