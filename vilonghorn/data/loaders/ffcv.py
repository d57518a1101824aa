"""The loader of a `.beton`: decodes with FFCV's library, and prepares the next batches in a thread."""

import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
import torch

from ..beton.format import MODES, Beton
from ..rng import CROP, sample_of, uniform
from ..threads import in_order
from .config import LoaderConfig
from .decode import decode, decode_bicubic
from .loader import Batch, Loader

ATTEMPTS = 10  # as in torchvision's RandomResizedCrop, whose distribution the crops have


class FFCVLoader(Loader):
    """Batches of a `.beton`. `config.workers` is a number of decoding threads, at least 1 and at most the CPUs."""

    def __init__(self, beton: Beton, config: LoaderConfig):
        super().__init__(config, beton.labels, beton.classes, str(beton.path), beton.digest)
        self._beton = beton
        self._file = np.asarray(np.memmap(beton.path, np.uint8, "r"))
        self._threads = max(1, min(config.workers, numba.config.NUMBA_NUM_THREADS))
        image = beton.images
        columns = image["data_ptr"], beton.sizes, image["height"], image["width"], image["mode"] == MODES["jpg"]
        self._samples = np.stack([column.astype(np.int64) for column in columns], axis=1)
        self._unchecked = np.full(len(image), config.checksums and beton.checksums is not None)

    def _read(self, epoch: int, batches: list[np.ndarray]) -> Iterator[Batch]:
        return in_order(lambda views: self._decode(epoch, views), batches, workers=1)

    def _decode(self, epoch: int, views: np.ndarray) -> Batch:
        indices = sample_of(views)
        self._check(np.unique(indices[self._unchecked[indices]]))
        samples = self._samples[indices]
        crops = self._crops(epoch, views, heights=samples[:, 2], widths=samples[:, 3])
        images = np.empty((len(views), *self.config.size_at(epoch), 3), np.uint8)
        function = decode if self.config.interpolation == "area" else decode_bicubic
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
        config = self.config
        if not config.training:
            return np.pad(center_crops(heights, widths, config.image_size, config.crop_pct), ((0, 0), (0, 1)))
        uniforms = uniform(config.seed, epoch, views, 1 + 4 * ATTEMPTS, CROP)
        boxes = random_crops(uniforms[:, 1:], heights, widths, config.scale, config.ratio)
        return np.concatenate([boxes, uniforms[:, :1] < config.hflip], axis=1)


def random_crops(
    uniforms: np.ndarray,
    heights: np.ndarray,
    widths: np.ndarray,
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> np.ndarray:
    """Random resized crops: area uniform in `scale`, aspect ratio log-uniform in `ratio`, position uniform.

    The first of ten attempts that fits into the image, else its centre with the aspect ratio clipped to `ratio`.
    `uniforms` are (B, 4 * ATTEMPTS) random numbers, `heights` and `widths` (B,) in pixels, `scale` the area as a
    fraction of the image, `ratio` width over height. Returns (B, 4) int64: top, bottom, left, right.
    """
    area, aspect, down, right = uniforms.reshape(len(uniforms), ATTEMPTS, 4).transpose(2, 0, 1)
    target = (heights * widths)[:, None] * (scale[0] + (scale[1] - scale[0]) * area)
    aspect = np.exp(np.log(ratio[0]) + (np.log(ratio[1]) - np.log(ratio[0])) * aspect)
    w = np.rint(np.sqrt(target * aspect)).astype(np.int64)
    h = np.rint(np.sqrt(target / aspect)).astype(np.int64)
    fits = (w >= 1) & (h >= 1) & (w <= widths[:, None]) & (h <= heights[:, None])
    rows, first = np.arange(len(uniforms)), fits.argmax(1)
    w, h, down, right = (value[rows, first] for value in (w, h, down, right))
    top = (down * (heights - h + 1)).astype(np.int64)
    left = (right * (widths - w + 1)).astype(np.int64)

    clipped = np.clip(widths / heights, *ratio)
    centre_w = np.clip(np.rint(np.minimum(widths, heights * clipped)), 1, None).astype(np.int64)
    centre_h = np.clip(np.rint(np.minimum(heights, widths / clipped)), 1, None).astype(np.int64)
    fitted = fits.any(1)
    w, h = np.where(fitted, w, centre_w), np.where(fitted, h, centre_h)
    top, left = np.where(fitted, top, (heights - h) // 2), np.where(fitted, left, (widths - w) // 2)
    return np.stack([top, top + h, left, left + w], axis=1)


def center_crops(heights: np.ndarray, widths: np.ndarray, size: tuple[int, int], crop_pct: float) -> np.ndarray:
    """Centre crops: the largest box of the shape of `size`, (height, width), times `crop_pct`.

    `heights` and `widths` of the images are (B,) in pixels. Returns (B, 4) int64: top, bottom, left, right.
    """
    aspect = size[1] / size[0]
    h = crop_pct * np.minimum(heights, widths / aspect)
    w = np.clip(np.rint(h * aspect), 1, widths).astype(np.int64)
    h = np.clip(np.rint(h), 1, heights).astype(np.int64)
    top, left = (heights - h) // 2, (widths - w) // 2
    return np.stack([top, top + h, left, left + w], axis=1)
