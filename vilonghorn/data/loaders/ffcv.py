"""The loader of a `.beton`: decodes, crops, resizes and mirrors with the C functions of FFCV, a batch ahead.

FFCV's own decoders ignore errors, and are compiled again for each loader (6 to 10 s). Here numba caches the compiled
loop on disk, because the C functions are called by name.
"""

import ctypes
import importlib.util
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import PathFinder

import llvmlite.binding
import numba
import numpy as np
import torch
from numba import njit, prange, types
from PIL import Image

from ..beton.format import MODES, Beton
from ..rng import CROP, sample_of, uniform
from ..threads import in_order
from .config import LoaderConfig
from .loader import Batch, Loader

ATTEMPTS = 10  # as in torchvision's RandomResizedCrop, whose distribution the crops have


def load_library() -> ctypes.CDLL:
    """FFCV's library alone: importing FFCV changes the number of torch's threads, and numba's type of byte arrays."""
    package = importlib.util.find_spec("ffcv")
    library = package and PathFinder.find_spec("_libffcv", package.submodule_search_locations)
    if library is None:
        raise ImportError("there is no module ffcv._libffcv")
    return ctypes.CDLL(library.origin)


_library = load_library()
for _name in ("imdecode", "resize"):
    _address = ctypes.cast(getattr(_library, _name), ctypes.c_void_p).value
    llvmlite.binding.add_symbol(f"vilonghorn_ffcv_{_name}", _address)
_i64, _u32 = types.int64, types.uint32
_bytes = types.Array(types.uint8, 1, "C", readonly=True)
_imdecode = types.ExternalFunction(
    "vilonghorn_ffcv_imdecode",
    types.int32(types.uintp, types.uint64, _u32, _u32, types.uintp, *[_u32] * 6, types.boolean, types.boolean),
)
_resize = types.ExternalFunction("vilonghorn_ffcv_resize", types.void(*[_i64] * 11))
_lock = threading.Lock()  # numba's "workqueue" threading layer aborts the process if two threads enter parallel loops


@njit(types.boolean(_bytes, _i64, _i64), nogil=True, cache=True)
def _is_jpeg_of(data, height, width):
    """Whether the frame header of a JPEG has this size. FFCV returns wrong pixels if it has another."""
    at = 2
    while at + 8 < len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # a fill byte
            at += 1
        elif 0xC0 <= marker <= 0xCF and marker != 0xC4 and marker != 0xC8 and marker != 0xCC:
            return data[at + 5] * 256 + data[at + 6] == height and data[at + 7] * 256 + data[at + 8] == width
        else:
            at += 2 + data[at + 2] * 256 + data[at + 3]
    return False


@njit(types.int32(_bytes, types.uintp, _i64, _i64), nogil=True, cache=True)
def _decode_jpeg(data, target, height, width):
    """Writes the pixels of a JPEG to the address `target`. Returns 0, or another number for damaged data."""
    if not _is_jpeg_of(data, height, width):
        return -1
    return _imdecode(data.ctypes.data, len(data), height, width, target, height, width, 0, 0, 1, 1, False, False)


@njit(types.void(types.uint8[:, :, ::1]), nogil=True, cache=True)
def _mirror(image):
    for row in image:
        for left in range(len(row) // 2):
            right = len(row) - 1 - left
            for channel in range(3):  # much faster in numba than to assign slices
                row[left, channel], row[right, channel] = row[right, channel], row[left, channel]


@njit(
    types.void(_bytes, _i64[:, ::1], _i64[:, ::1], types.uint8[:, :, :, ::1], types.uint8[:, ::1], _i64[::1]),
    parallel=True,
    nogil=True,
    cache=True,
)
def _decode(file, samples, crops, out, buffers, status):
    for thread in prange(len(buffers)):
        for i in range(thread, len(samples), len(buffers)):
            at, length, h, w, is_jpeg = samples[i]
            top, bottom, left, right, mirror = crops[i]
            data, image = file[at : at + length], out[i]
            pixels = data.ctypes.data
            if is_jpeg:
                pixels = buffers[thread].ctypes.data
                status[i] = _decode_jpeg(data, pixels, h, w)
            _resize(0, pixels, h, w, top, bottom, left, right, image.ctypes.data, image.shape[0], image.shape[1])
            if mirror:
                _mirror(image)


def decode(file: np.ndarray, samples: np.ndarray, crops: np.ndarray, out: np.ndarray, threads: int) -> np.ndarray:
    """Fills `out` with crops of images, resized by area averages.

    Args:
        file: the file as bytes, memory-mapped.
        samples: (B, 5) int64: offset and length of the data in the file, height, width, whether they are JPEG.
        crops: (B, 5) int64: top, bottom, left, right (inside the image and not empty), whether to mirror.
        out: (B, H, W, 3) uint8, contiguous.
        threads: number of threads.

    Returns:
        (B,) bool: where the data are not a JPEG of this size, or the decoder reported an error or a warning.
    """
    status = np.zeros(len(samples), np.int64)
    largest = 3 * int((samples[:, 2] * samples[:, 3] * samples[:, 4]).max())
    with _lock:
        _decode(file, samples, crops, out, np.empty((threads, largest), np.uint8), status)
    return status != 0


def decode_bicubic(
    file: np.ndarray, samples: np.ndarray, crops: np.ndarray, out: np.ndarray, threads: int
) -> np.ndarray:
    """As `decode`, but resized by PIL, bicubic with antialiasing. FFCV's decoder and PIL release Python's lock."""

    def one(i: int) -> bool:
        at, length, height, width, is_jpeg = samples[i].tolist()
        top, bottom, left, right, mirror = crops[i].tolist()
        pixels, status = file[at : at + length], 0
        if is_jpeg:
            pixels = np.empty(3 * height * width, np.uint8)
            status = _decode_jpeg(file[at : at + length], pixels.ctypes.data, height, width)
        image = Image.frombuffer("RGB", (width, height), pixels, "raw", "RGB", 0, 1)
        size = out.shape[2], out.shape[1]
        resized = image.resize(size, Image.Resampling.BICUBIC, box=(left, top, right, bottom))
        out[i] = np.asarray(resized)[:, :: -1 if mirror else 1]
        return status != 0

    with ThreadPoolExecutor(threads) as pool:
        return np.fromiter(pool.map(one, range(len(samples))), bool, len(samples))


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
