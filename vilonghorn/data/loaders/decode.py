"""Decodes, crops, resizes and mirrors a batch of images from a `.beton` with the C functions of FFCV.

FFCV's own decoders ignore errors, and are compiled again for each loader (6 to 10 s). Here numba caches the compiled
loop on disk, because the C functions are called by name.
"""

import ctypes
import importlib.util
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import PathFinder

import llvmlite.binding
import numpy as np
from numba import njit, prange, types
from PIL import Image


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
