"""Writes `.beton` files from image folders and map-style datasets: threads that encode, one file that grows in order.

FFCV's own writer waits for ever when a worker fails and leaves shared memory behind; this one writes the same format
(FFCV reads it unchanged) from one process, and its bytes do not depend on the number of workers.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
from tqdm import tqdm

from ..files import replacing
from ..images import MIN_SIDE, ImageFiles, ImageFolder, UnreadableImage
from ..rng import uniform
from ..threads import available_cpus, in_order
from . import format as fmt
from .encode import MapDataset, encode_sample
from .survey import Survey, refusal, survey

MIN_PAGE = 8 << 20  # bytes; FFCV's default. Images do not straddle pages.
MAX_RESOLUTION = 16384  # pixels; keeps a page below the 4 GiB that the header can name
JPEG_SHARE = 0.08  # of the raw size, at the least, of a photograph at quality 90: for the check of the disk's space


def write_beton(
    source: str | os.PathLike | MapDataset,
    path: str | os.PathLike,
    *,
    mode: str = "raw",
    max_resolution: int = 500,
    jpeg_quality: int = 90,
    compress_probability: float = 0.5,
    classes: Sequence[str] | None = None,
    workers: int | None = None,
    skip_unreadable: bool = False,
    overwrite: bool = False,
    progress: bool = True,
) -> fmt.Beton:
    """Writes a dataset to a `.beton`, and its manifest `NAME.beton.json` beside it.

    The file gets its final name only when it is whole and checked; an error leaves the name as it was.

    Args:
        source: an image folder (`root/class/image`), or a map-style dataset of (image, label), such as `flat_images`
            gives, where an image is a PIL image or a uint8 array (H, W), (H, W, 1) or (H, W, 3), and a label a
            non-negative integer. A dataset is read from several threads unless `workers` is 1.
        path: the file to write; its folder exists.
        mode: "raw" (8-bit pixels, fastest to read), "jpg", or "proportion" (some of the images as "jpg").
        max_resolution: larger images are shrunk, so that no side has more pixels.
        jpeg_quality: 1 to 100.
        compress_probability: with mode "proportion", the share of the images stored as JPEG.
        classes: class names of a dataset; default its attribute `classes`, as torchvision's have.
        workers: encoding threads; default one for each CPU.
        skip_unreadable: leave out images that cannot be decoded, and list them in the manifest, instead of stopping.
        overwrite: replace an existing file.
        progress: show a progress bar.

    Returns:
        The tables of the file written.

    Raises:
        FileExistsError: `path` exists and `overwrite` is not set.
        FileNotFoundError: the source or the folder of `path` does not exist.
        OSError: the disk has not enough space.
        TypeError, ValueError: the source or an option is not as described; the message names the sample.
    """
    path = Path(path)
    _check_options(mode, max_resolution, jpeg_quality, compress_probability, workers)
    _check_target(path, overwrite)
    workers = workers or available_cpus()
    compressed = {"raw": 0.0, "jpg": 1.0, "proportion": compress_probability}[mode]
    if isinstance(source, (str, os.PathLike)):
        source = ImageFolder(source)
    found = Survey(0, {}, {})
    if isinstance(source, ImageFiles):
        found = survey(source, max_resolution=max_resolution, workers=workers, progress=progress)
        if found.unreadable and not skip_unreadable:
            raise UnreadableImage(refusal(found.unreadable))
        _check_space(path, found.raw_bytes, compressed)
    if len(source) == 0:
        raise ValueError("the dataset to write is empty; expected at least one sample")
    classes = classes if classes is not None else getattr(source, "classes", None)
    classes = list(classes) if classes is not None else None
    if (problem := fmt.class_names_problem(classes)) is not None:
        raise ValueError(f"{problem}; give classes=[...], one string for each label")

    def encode(index: int) -> tuple[np.ndarray, bytes] | None:
        if index in found.unreadable:
            return None
        as_jpeg = uniform(0, -1, np.array([index]), 1)[0, 0] < compressed
        try:
            return encode_sample(
                source,
                index,
                as_jpeg=as_jpeg,
                max_resolution=max_resolution,
                quality=jpeg_quality,
                num_classes=len(classes) if classes is not None else None,
            )
        except UnreadableImage as error:
            if not skip_unreadable:
                raise UnreadableImage(refusal({index: str(error)})) from None
            found.unreadable[index] = str(error)
            return None

    page = max(MIN_PAGE, 1 << (4 * max_resolution**2).bit_length())
    with _named_when_full(path), replacing(path) as file, closing(in_order(encode, len(source), workers)) as encoded:
        bar = tqdm(encoded, total=len(source), desc=f"writing {path.name}", unit="img", disable=not progress)
        samples, images = _write(file, bar, len(source), page)
        if len(samples) == 0:
            raise UnreadableImage(f"no image of the dataset can be read, the first for this: {found.unreadable[0]}")
        manifest = {
            "samples": len(samples),
            "classes": classes,
            "left_out": [found.unreadable[index] for index in sorted(found.unreadable)],
            "converted": found.summary(),
            "class_counts": np.bincount(samples["label"], minlength=len(classes or ())).tolist(),
            "sha256": {"tables": fmt.tables_digest(file), "images": images},
            "settings": {
                "mode": mode,
                "max_resolution": max_resolution,
                "jpeg_quality": jpeg_quality,
                "compress_probability": compressed,
            },
        }
        fmt.check_beton(file.name)
        os.fsync(file.fileno())  # what can fail or take long is done before either of the two files is replaced
        with replacing(fmt.manifest_path(path)) as beside:
            beside.write((json.dumps(manifest, indent=1) + "\n").encode())
    return fmt.check_beton(path)


@contextmanager
def _named_when_full(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise OSError(f"{path}: the disk filled up; free some space, write elsewhere, or take mode 'jpg'") from error


def _check_options(mode: str, max_resolution: int, quality: int, probability: float, workers: int | None) -> None:
    if mode not in ("raw", "jpg", "proportion"):
        raise ValueError(f"mode {mode!r}: expected 'raw', 'jpg' or 'proportion'")
    if not MIN_SIDE <= max_resolution <= MAX_RESOLUTION:
        raise ValueError(f"max_resolution {max_resolution}: expected {MIN_SIDE} to {MAX_RESOLUTION} pixels")
    if not 1 <= quality <= 100:
        raise ValueError(f"jpeg_quality {quality}: expected 1 to 100")
    if not 0 <= probability <= 1:
        raise ValueError(f"compress_probability {probability}: expected 0 to 1")
    if workers is not None and workers < 1:
        raise ValueError(f"workers {workers}: expected at least 1")


def _check_target(path: Path, overwrite: bool) -> None:
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent}: no such folder to write {path.name} into; make it first")
    if path.is_dir():
        raise IsADirectoryError(f"{path}: is a folder; give the name of the .beton file to write")
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path}: exists; give another name, or --overwrite (overwrite=True) to replace it")
    for left in path.parent.glob(f"{glob.escape(path.name)}.*.partial"):
        warnings.warn(f"{left}: left by a writer that was killed; delete it, unless one is at work", stacklevel=3)


def _check_space(path: Path, raw_bytes: int, compressed: float) -> None:
    needed, free = raw_bytes * (1 - compressed + compressed * JPEG_SHARE), shutil.disk_usage(path.parent).free
    if needed > free:
        raise OSError(
            f"{path}: needs about {needed / 1e9:.1f} GB and its disk has {free / 1e9:.1f} GB free; "
            "free some, write elsewhere, or take mode 'jpg' or a lower max_resolution"
        )


def _write(
    file: BinaryIO, encoded: Iterator[tuple[np.ndarray, bytes] | None], count: int, page: int
) -> tuple[np.ndarray, str]:
    """Writes all parts, the header last, so that an unfinished file says so.

    Args:
        file: the file.
        encoded: the samples, None for those that are left out.
        count: how many there are at most, for whose metadata there is to be room.
        page: size of a page in bytes.

    Returns:
        The metadata, and the SHA-256 of the image data.
    """
    samples, regions = np.zeros(count, fmt.SAMPLE), np.zeros(count, fmt.REGION)
    digest, at, written = hashlib.sha256(), fmt.TABLES_AT + samples.nbytes, 0
    at += -at % page
    for row, data in filter(None, encoded):
        padding = -at % page if at % page + len(data) > page else 0
        at += padding
        file.seek(at)
        file.write(data)
        digest.update(bytes(padding) + data)
        row["image"]["data_ptr"] = at
        samples[written], regions[written] = row, (written, at, len(data))
        at += len(data)
        written += 1
    samples, regions = samples[:written], regions[:written]
    header = np.array((fmt.VERSION, len(fmt.FIELD_TYPES), page, written, at), fmt.HEADER)
    fields = np.zeros(len(fmt.FIELD_TYPES), fmt.FIELD)
    fields["type_id"], fields["name"] = fmt.FIELD_TYPES, (b"image", b"label")
    file.seek(at)
    file.write(regions.tobytes())
    file.flush()
    file.seek(0)
    file.write(header.tobytes() + fields.tobytes() + samples.tobytes())
    file.flush()
    return samples, digest.hexdigest()
