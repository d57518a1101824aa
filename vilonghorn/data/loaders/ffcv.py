"""The loader of a `.beton`: decodes with FFCV's library, and prepares the next batches in a thread."""

import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
import torch

from ..beton.format import MODES, Beton
from ..crops import ATTEMPTS, center_crops, random_crops
from ..rng import CROP, sample_of, uniform
from ..threads import in_order
from .decode import decode, decode_bicubic
from .loader import Batch, Loader
from .settings import LoaderSettings


class FFCVLoader(Loader):
    """Batches of a `.beton`. `settings.workers` is a number of decoding threads, at least 1 and at most the CPUs."""

    def __init__(self, beton: Beton, settings: LoaderSettings):
        super().__init__(settings, beton.labels, beton.classes, str(beton.path), beton.digest)
        self._beton = beton
        self._file = np.asarray(np.memmap(beton.path, np.uint8, "r"))
        self._threads = max(1, min(settings.workers, numba.config.NUMBA_NUM_THREADS))
        image = beton.images
        columns = image["data_ptr"], beton.sizes, image["height"], image["width"], image["mode"] == MODES["jpg"]
        self._samples = np.stack([column.astype(np.int64) for column in columns], axis=1)
        self._unchecked = np.full(len(image), settings.checksums and beton.checksums is not None)

    def _read(self, epoch: int, batches: list[np.ndarray]) -> Iterator[Batch]:
        return in_order(lambda views: self._decode(epoch, views), batches, workers=1)

    def _decode(self, epoch: int, views: np.ndarray) -> Batch:
        indices = sample_of(views)
        self._check(np.unique(indices[self._unchecked[indices]]))
        samples = self._samples[indices]
        crops = self._crops(epoch, views, heights=samples[:, 2], widths=samples[:, 3])
        images = np.empty((len(views), *self.settings.size_at(epoch), 3), np.uint8)
        function = decode if self.settings.interpolation == "area" else decode_bicubic
        failed = function(self._file, samples, crops, images, self._threads)
        if failed.any():
            index = indices[failed.argmax()]
            raise ValueError(f"{self._beton.path}: sample {index}: its JPEG data are damaged; write the file again")
        return torch.from_numpy(images).permute(0, 3, 1, 2), torch.from_numpy(self._beton.labels[indices])

    def _check(self, indices: np.ndarray) -> None:
        """Compares samples, which are read for the first time, with their checksums."""
        if not len(indices):
            return

        def checksum(index: int) -> int:
            at, length = self._samples[index, :2]
            return zlib.crc32(self._file[at : at + length])

        with ThreadPoolExecutor(self._threads) as pool:
            found = np.fromiter(pool.map(checksum, indices), np.int64, len(indices))
        if (damaged := found != self._beton.checksums[indices]).any():
            what = f"sample {indices[damaged.argmax()]}: its data are not those that were written"
            raise ValueError(f"{self._beton.path}: {what}; write the file again, or copy it again with its manifest")
        self._unchecked[indices] = False

    def _crops(self, epoch: int, views: np.ndarray, heights: np.ndarray, widths: np.ndarray) -> np.ndarray:
        """(B, 5) int64: top, bottom, left, right, and whether to mirror."""
        settings = self.settings
        if settings.training:
            draws = uniform(settings.seed, epoch, views, 1 + 4 * ATTEMPTS, CROP)
            boxes = random_crops(draws[:, 1:], heights, widths, settings.scale, settings.ratio)
            flips = draws[:, :1] < settings.hflip
        else:
            boxes = center_crops(heights, widths, settings.image_size, settings.crop_pct)
            flips = np.zeros((len(views), 1), bool)
        return np.concatenate([boxes, flips], axis=1)
