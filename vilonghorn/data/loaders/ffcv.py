"""The loader of a `.beton`: decodes, crops, resizes and mirrors with the C functions of FFCV, a batch ahead.

FFCV's own decoders ignore errors, and are compiled by numba for each loader (6 to 10 s). Here threads call the same C
functions, which release Python's lock.
"""

import ctypes
import importlib.util
import os
import weakref
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import PathFinder

import numpy as np
import torch
from PIL import Image
from timm.layers import to_2tuple

from ..atomic_files import named_errors
from ..beton.format import MODES, Beton
from ..rng import CROP, sample_of, uniform
from ..threads import available_cpus, in_order
from .config import LoaderConfig
from .loader import Batch, Loader

ATTEMPTS = 10  # as in torchvision's RandomResizedCrop, whose distribution the crops have


# The library alone: importing FFCV changes the number of torch's threads, and numba's type of byte arrays.
_package = importlib.util.find_spec("ffcv")
_spec = _package and PathFinder.find_spec("_libffcv", _package.submodule_search_locations)
if _spec is None:
    raise ImportError("there is no module ffcv._libffcv")
_library = ctypes.CDLL(_spec.origin)
_pointer, _size, _flag = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_bool
_library.imdecode.argtypes = [_pointer, ctypes.c_uint64, _size, _size, _pointer, *[_size] * 6, _flag, _flag]
_library.resize.argtypes = [ctypes.c_int64] * 11


def is_jpeg_of(data: np.ndarray, height: int, width: int) -> bool:
    """Whether the frame header of a JPEG has this size. FFCV returns wrong pixels if it has another."""
    at = 2
    while at + 8 < len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # a fill byte
            at += 1
        elif 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            return bytes(data[at + 5 : at + 9]) == height.to_bytes(2, "big") + width.to_bytes(2, "big")
        else:
            at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return False


def decode_jpeg(data: np.ndarray, height: int, width: int) -> np.ndarray:
    """The pixels (height, width, 3) uint8 of a JPEG (n,). Raises ValueError if it is damaged or of another size."""
    out = np.empty((height, width, 3), np.uint8)
    whole = 0, 0, 1, 1, False, False  # offsets, scale, no crop, no flip
    if not is_jpeg_of(data, height, width) or _library.imdecode(
        data.ctypes.data, len(data), height, width, out.ctypes.data, height, width, *whole
    ):
        raise ValueError("its JPEG data are damaged")
    return out


def resize_area(image: np.ndarray, box: tuple[int, int, int, int], out: np.ndarray) -> None:
    """Fills `out` (H, W, 3) uint8 with averages of a box of `image`: top, bottom, left, right, inside and not empty."""
    _library.resize(0, image.ctypes.data, *image.shape[:2], *box, out.ctypes.data, *out.shape[:2])


def resize_bicubic(image: np.ndarray, box: tuple[int, int, int, int], out: np.ndarray) -> None:
    """As `resize_area`, but by PIL: bicubic with antialiasing."""
    top, bottom, left, right = box
    picture = Image.frombuffer("RGB", image.shape[1::-1], image, "raw", "RGB", 0, 1)
    out[:] = picture.resize(out.shape[1::-1], Image.Resampling.BICUBIC, box=(left, top, right, bottom))


class FFCVLoader(Loader):
    """Batches of a `.beton`. `config.workers` is a number of decoding threads, at least 1 and at most the CPUs."""

    def __init__(self, beton: Beton, config: LoaderConfig):
        if config.crop_mode == "border" and not config.training:
            raise ValueError(f"{beton.path}: crop_mode border reads image folders only; a .beton has center or squash")
        super().__init__(beton, config)
        self._file = os.open(beton.path, os.O_RDONLY)  # not mapped: an error of the disk would end the process
        weakref.finalize(self, os.close, self._file)
        self._threads = max(1, min(config.workers, available_cpus()))
        self._resize = resize_area if config.interpolation == "area" else resize_bicubic
        self._unchecked = np.full(len(beton.images), config.checksums is not False and beton.checksums is not None)

    def _read(self, epoch: int, batches: list[np.ndarray]) -> Iterator[Batch]:
        with ThreadPoolExecutor(self._threads) as pool:
            yield from in_order(lambda views: self._decode(pool, epoch, views), batches, workers=1)

    def _decode(self, pool: ThreadPoolExecutor, epoch: int, views: np.ndarray) -> Batch:
        indices = sample_of(views)
        images = np.empty((len(views), *self.config.size_at(epoch), 3), np.uint8)
        for _ in pool.map(self._fill, indices.tolist(), self._crops(epoch, views, indices).tolist(), images):
            pass  # raises the error of the first sample that has one
        return torch.from_numpy(images).permute(0, 3, 1, 2), torch.from_numpy(self.targets[indices])

    def _fill(self, index: int, crop: list[int], out: np.ndarray) -> None:
        """Fills `out` (H, W, 3) with a crop of a sample: top, bottom, left, right, and whether to mirror."""
        mode, width, height, at = self.data.images[index].tolist()
        size = int(self.data.sizes[index])
        with named_errors(self.data.path):
            data = np.frombuffer(os.pread(self._file, size, at), np.uint8)
        try:
            if len(data) < size:
                raise ValueError("the file is cut off before its end")
            if self._unchecked[index]:
                if zlib.crc32(data) != self.data.checksums[index]:
                    raise ValueError("its data are not those that were written")
                self._unchecked[index] = False
            is_jpeg = mode == MODES["jpg"]
            image = decode_jpeg(data, height, width) if is_jpeg else data.reshape(height, width, 3)
        except ValueError as error:
            remedy = "write the file again, or copy it again with its manifest"
            raise ValueError(f"{self.data.path}: sample {index}: {error}; {remedy}") from None
        self._resize(image, crop[:4], out)
        if crop[4]:
            out[:] = torch.from_numpy(out).flip(1)  # faster than by numpy

    def _crops(self, epoch: int, views: np.ndarray, indices: np.ndarray) -> np.ndarray:
        """(B, 5) int64: top, bottom, left, right, and whether to mirror."""
        config, images = self.config, self.data.images[indices]
        heights, widths = images["height"].astype(np.int64), images["width"].astype(np.int64)
        if not config.training:
            shape = to_2tuple(config.image_size)
            return np.pad(center_crops(heights, widths, config.crop_pct, config.crop_mode, shape), ((0, 0), (0, 1)))
        uniforms = uniform(config.seed, epoch, views, 1 + 4 * ATTEMPTS, CROP)
        boxes = random_crops(uniforms[:, 1:], heights, widths, config.scale, config.ratio)
        return np.concatenate([boxes, uniforms[:, :1] < config.hflip], axis=1)


def random_crops(
    uniforms: np.ndarray, heights: np.ndarray, widths: np.ndarray, scale: Sequence[float], ratio: Sequence[float]
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


def center_crops(
    heights: np.ndarray, widths: np.ndarray, crop_pct: float, crop_mode: str = "center", shape: Sequence[int] = (1, 1)
) -> np.ndarray:
    """Centre crops: the largest of the `shape` height to width times `crop_pct`; with `crop_mode` "squash" all of it.

    `heights` and `widths` of the images are (B,) in pixels. Returns (B, 4) int64: top, bottom, left, right.
    """
    sides, other = np.stack([heights, widths]), np.array(shape)[::-1, None]
    box = crop_pct * (sides if crop_mode == "squash" else (sides * other).min(0) / other)
    h, w = np.clip(np.rint(box), 1, None).astype(np.int64)
    top, left = (heights - h) // 2, (widths - w) // 2
    return np.stack([top, top + h, left, left + w], axis=1)
