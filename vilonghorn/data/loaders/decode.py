"""Decodes, crops, resizes and mirrors a batch of images from a `.beton`: one compiled loop over FFCV's C functions.

FFCV compiles its decoders for each loader (6 to 10 s) because they contain addresses; here addresses are arguments, so
that numba caches the compiled loop on disk. Errors of the JPEG decoder are reported, and each thread needs one buffer.
"""

from __future__ import annotations

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor

import llvmlite.binding
import numpy as np
from ffcv import libffcv
from numba import carray, njit, prange, types
from numba.extending import intrinsic
from PIL import Image

llvmlite.binding.add_symbol("vilonghorn_ffcv_imdecode", ctypes.cast(libffcv.ctypes_imdecode, ctypes.c_void_p).value)
llvmlite.binding.add_symbol("vilonghorn_ffcv_resize", ctypes.cast(libffcv.ctypes_resize, ctypes.c_void_p).value)
_u32, _i64 = types.uint32, types.int64
_imdecode = types.ExternalFunction(
    "vilonghorn_ffcv_imdecode",
    types.int32(types.uintp, types.uint64, _u32, _u32, types.uintp, *[_u32] * 6, types.boolean, types.boolean),
)
_resize = types.ExternalFunction("vilonghorn_ffcv_resize", types.void(*[_i64] * 11))
_lock = threading.Lock()  # numba's "workqueue" threading layer aborts the process if two threads enter parallel loops


@intrinsic
def _bytes_at(typingctx, address):
    """The address as a pointer: FFCV marks numba's type uint8[::1] read-only, which excludes array arguments."""

    def codegen(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.uint8)(types.intp), codegen


@njit(types.boolean(_i64, _i64, _i64, _i64), nogil=True, cache=True)
def _is_jpeg_of(source, length, height, width):
    """Whether the frame header of a JPEG has this size. FFCV returns wrong pixels if it has another."""
    data = carray(_bytes_at(source), (length,))
    at = 2
    while at + 8 < length and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # a fill byte
            at += 1
        elif 0xC0 <= marker <= 0xCF and marker != 0xC4 and marker != 0xC8 and marker != 0xCC:
            return data[at + 5] * 256 + data[at + 6] == height and data[at + 7] * 256 + data[at + 8] == width
        else:
            at += 2 + data[at + 2] * 256 + data[at + 3]
    return False


@njit(
    types.void(_i64, _i64[:, ::1], _i64[:, ::1], _i64, _i64, _i64, _i64, _i64, _i64, _i64[::1]),
    parallel=True,
    nogil=True,
    cache=True,
)
def _decode(file, samples, crops, out, height, width, scratch, scratch_size, threads, status):
    for thread in prange(threads):
        buffer = scratch + thread * scratch_size
        for i in range(thread, len(samples), threads):
            source = file + samples[i, 0]
            h, w = samples[i, 2], samples[i, 3]
            if samples[i, 4]:
                if not _is_jpeg_of(source, samples[i, 1], h, w):
                    status[i] = -1
                    continue
                status[i] = _imdecode(source, samples[i, 1], h, w, buffer, h, w, 0, 0, 1, 1, False, False)
                source = buffer
            target = out + i * height * width * 3
            top, bottom, left, right = crops[i, 0], crops[i, 1], crops[i, 2], crops[i, 3]
            _resize(0, source, h, w, top, bottom, left, right, target, height, width)
            if crops[i, 4]:
                image = carray(_bytes_at(target), (height, width, 3))
                for row in range(height):
                    for column in range(width // 2):
                        for channel in range(3):
                            kept = image[row, column, channel]
                            image[row, column, channel] = image[row, width - 1 - column, channel]
                            image[row, width - 1 - column, channel] = kept


def decode(file: np.ndarray, samples: np.ndarray, crops: np.ndarray, out: np.ndarray, threads: int) -> np.ndarray:
    """Fills `out` with crops of images, resized by area averages.

    Args:
        file: the file as bytes, memory-mapped.
        samples: (B, 5) int64: offset and length of the data in the file, height, width, whether they are JPEG.
        crops: (B, 5) int64: top, bottom, left, right (inside the image and not empty), whether to mirror.
        out: (B, H, W, 3) uint8, contiguous.
        threads: number of threads.

    Returns:
        (B,) int64: not 0 where the data are not a JPEG of this size, or the decoder reported an error or a warning.
    """
    status = np.zeros(len(samples), np.int64)
    pixels = samples[:, 2] * samples[:, 3] * samples[:, 4]
    scratch = np.empty((threads, max(1, 3 * int(pixels.max()))), np.uint8)
    height, width = out.shape[1:3]
    with _lock:
        _decode(
            file.ctypes.data,
            np.ascontiguousarray(samples),
            np.ascontiguousarray(crops),
            out.ctypes.data,
            height,
            width,
            scratch.ctypes.data,
            scratch.shape[1],
            threads,
            status,
        )
    return status


def decode_bicubic(
    file: np.ndarray, samples: np.ndarray, crops: np.ndarray, out: np.ndarray, threads: int
) -> np.ndarray:
    """As `decode`, but resized by PIL, bicubic with antialiasing. FFCV's decoder and PIL release Python's lock."""

    def one(i: int) -> int:
        at, length, height, width, jpeg = samples[i].tolist()
        top, bottom, left, right, mirror = crops[i].tolist()
        pixels, failed = file[at : at + length], 0
        if jpeg:
            source, pixels = pixels.ctypes.data, np.empty(3 * height * width, np.uint8)
            if not _is_jpeg_of(source, length, height, width):
                return -1
            target, box = pixels.ctypes.data, (height, width, 0, 0, 1, 1)
            failed = libffcv.ctypes_imdecode(source, length, height, width, target, *box, False, False)
        image = Image.frombuffer("RGB", (width, height), pixels, "raw", "RGB", 0, 1)
        size = out.shape[2], out.shape[1]
        resized = image.resize(size, Image.Resampling.BICUBIC, box=(left, top, right, bottom))
        out[i] = np.asarray(resized)[:, :: -1 if mirror else 1]
        return failed

    with ThreadPoolExecutor(threads) as pool:
        return np.fromiter(pool.map(one, range(len(samples))), np.int64, len(samples))
