"""Writes `.beton` files from image folders and map-style datasets: threads encode, and the file grows in order.

FFCV's own writer hangs when a worker fails, and leaves shared memory behind. This one writes the same format from one
process, and its bytes do not depend on the number of workers.
"""

import base64
import glob
import hashlib
import io
import json
import math
import operator
import os
import shutil
import warnings
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image
from tqdm import tqdm

from ..files import atomic_write, explain_full_disk, only_writer
from ..images import MAX_PIXELS, MIN_SIDE, ImageFiles, ImageFolder, UnreadableImage, read_header, to_rgb
from ..rng import uniform
from ..threads import available_cpus, in_order
from . import format as fmt

MIN_PAGE = 8 << 20  # bytes; FFCV's default. An image lies within one page.
JPEG_SIZE = 0.08  # smallest size of a photograph as JPEG, of its raw size; for the check of the free space
MAX_RESOLUTION = 16384  # pixels; keeps a page below the 4 GiB that the header can name
SHOWN = 10  # names of one kind in a message or in the manifest; the others are only counted


def write_beton(
    source: str | os.PathLike | Sequence[tuple[Any, int]],
    path: str | os.PathLike,
    *,
    mode: str = "raw",
    max_resolution: int = 500,
    max_pixels: int = MAX_PIXELS,
    jpeg_quality: int = 90,
    compress_probability: float = 0.5,
    classes: Sequence[str] | None = None,
    workers: int | None = None,
    skip_unreadable: bool = False,
    overwrite: bool = False,
    progress: bool = True,
) -> fmt.Beton:
    """Writes a dataset to a `.beton`, and its manifest `NAME.beton.json` beside it, and returns its tables.

    The file gets its final name only when it is complete and checked; an error leaves an older file as it was.

    Args:
        source: an image folder (`root/class/image`), or a map-style dataset of (image, label), such as `flat_images`
            gives, where an image is a PIL image or a uint8 array (H, W), (H, W, 1) or (H, W, 3), and a label a
            non-negative integer. A dataset is read from several threads unless `workers` is 1.
        path: the file to write; its folder exists.
        mode: "raw" (8-bit pixels, fastest to read), "jpg", or "proportion" (some of the images as "jpg").
        max_resolution: larger images are shrunk until no side has more pixels.
        max_pixels: an image file of a folder with more pixels is refused; a dataset has its own limit.
        jpeg_quality: 1 to 100.
        compress_probability: with mode "proportion", the fraction of the images stored as JPEG.
        classes: class names of a dataset; default: its attribute `classes`, as torchvision's have.
        workers: encoding threads; default: one for each CPU.
        skip_unreadable: leave out images that cannot be decoded, and list them in the manifest.
        overwrite: replace an existing file.
        progress: show a progress bar.

    Raises:
        FileExistsError: `path` exists and `overwrite` is not set, or another process writes it.
        FileNotFoundError: the source or the folder of `path` does not exist.
        OSError: the disk has not enough space.
        TypeError, ValueError: the source or an option is not as described; the message names the sample.
    """
    path = Path(path)
    workers = available_cpus() if workers is None else workers
    fractions = {"raw": 0.0, "jpg": 1.0, "proportion": compress_probability}
    if mode not in fractions:
        raise ValueError(f"mode {mode!r}: expected {', '.join(fractions)}")
    for name, value, low, high in (
        ("max_resolution", max_resolution, MIN_SIDE, MAX_RESOLUTION),
        ("jpeg_quality", jpeg_quality, 1, 100),
        ("compress_probability", compress_probability, 0, 1),
        ("workers", workers, 1, math.inf),
    ):
        if not low <= value <= high:
            raise ValueError(f"{name} {value}: expected {low} to {high}")
    with only_writer(path):
        _check_target(path, overwrite)
        jpeg_fraction = fractions[mode]
        if isinstance(source, (str, os.PathLike)):
            source = ImageFolder(source, max_pixels)
        unreadable: dict[int, str] = {}  # by sample index, why its image cannot be used
        converted: dict[str, list[str]] = {}  # files by what is converted
        if isinstance(source, ImageFiles):
            raw_bytes, unreadable, converted = _read_headers(source, max_resolution, workers, progress)
            if unreadable and not skip_unreadable:
                raise _refusal(unreadable)
            needed = raw_bytes * (1 - jpeg_fraction + jpeg_fraction * JPEG_SIZE)
            free = shutil.disk_usage(path.parent).free
            if needed > free:
                raise OSError(
                    f"{path}: needs about {needed / 1e9:.1f} GB and its disk has {free / 1e9:.1f} GB free; "
                    "free some, write elsewhere, or take mode 'jpg' or a lower max_resolution"
                )
        if len(source) == 0:
            raise ValueError("the dataset to write is empty; expected at least one sample")
        classes = getattr(source, "classes", None) if classes is None else classes
        classes = None if classes is None else list(classes)
        if (problem := fmt.class_names_problem(classes)) is not None:
            raise ValueError(f"{problem}; give classes=[...], one string for each label")
        limit = len(classes) if classes is not None else fmt.MAX_CLASSES

        def encode(index: int) -> tuple[np.ndarray, bytes] | None:
            if index in unreadable:
                return None
            quality = jpeg_quality if uniform(0, -1, np.array([index]), 1)[0, 0] < jpeg_fraction else None
            try:
                image, label = source[index]
                return encode_sample(image, label, f"sample {index}", max_resolution, quality, limit)
            except UnreadableImage as error:
                if not skip_unreadable:
                    raise _refusal({index: str(error)}) from None
                unreadable[index] = str(error)
                return None

        page = max(MIN_PAGE, 1 << (4 * max_resolution**2).bit_length())
        with (
            explain_full_disk(path, "write again, elsewhere or with mode 'jpg'"),
            atomic_write(path) as file,
            closing(in_order(encode, range(len(source)), workers)) as encoded,
        ):
            bar = tqdm(encoded, total=len(source), desc=f"writing {path.name}", unit="img", disable=not progress)
            written = _write(file, bar, len(source), page)
            if written is None:
                raise UnreadableImage(f"no image of the dataset can be read; the first error: {unreadable[0]}")
            images, checksums = written
            beton = fmt.check_beton(file.name)
            manifest = {
                "samples": beton.num_samples,
                "classes": classes,
                "left_out": [unreadable[index] for index in sorted(unreadable)],
                "converted": {
                    kind: {"count": len(names), "first": names[:SHOWN]} for kind, names in sorted(converted.items())
                },
                "class_counts": np.bincount(beton.labels, minlength=len(classes or ())).tolist(),
                "sha256": {"tables": beton.digest, "images": images, "classes": fmt.digest_of_names(classes)},
                "crc32": base64.b64encode(checksums.tobytes()).decode("ascii"),
                "settings": {
                    "mode": mode,
                    "max_resolution": max_resolution,
                    "jpeg_quality": jpeg_quality,
                    "compress_probability": jpeg_fraction,
                },
            }
            os.fsync(file.fileno())  # what can fail or take long is done before either of the two files is replaced
            with atomic_write(fmt.manifest_path(path), "w") as beside:
                beside.write(json.dumps(manifest, indent=1) + "\n")
        return fmt.check_beton(path)


def stored_size(width: int, height: int, max_resolution: int, name: str) -> tuple[int, int]:
    """(width, height) at which an image is stored. Raises UnreadableImage if a side would have less than 2 pixels."""
    shrink = min(1.0, max_resolution / max(width, height))
    stored = round(width * shrink), round(height * shrink)
    if min(stored) < MIN_SIDE:
        raise UnreadableImage(
            f"{name}: {width}x{height} pixels are stored as {stored[0]}x{stored[1]}, and each side must have at least "
            f"{MIN_SIDE}; remove the image or raise max_resolution"
        )
    return stored


def encode_sample(
    image: Any, label: Any, name: str, max_resolution: int, quality: int | None, num_classes: int
) -> tuple[np.ndarray, bytes]:
    """The row of metadata, without the pointer, and the image data of a sample called `name` in errors.

    `quality` is that of a JPEG; None stores 8-bit pixels. Raises TypeError or ValueError if the image or the label is
    not as `write_beton` says, or the label is not below `num_classes`.
    """
    try:
        label = operator.index(label)
    except TypeError:
        raise TypeError(f"{name}: label {label!r} is a {type(label).__name__}; expected an integer") from None
    if not 0 <= label < num_classes:
        raise ValueError(f"{name}: label {label}; expected 0 to {num_classes - 1}")
    image = _as_rgb(image, name)
    size = stored_size(*image.size, max_resolution, name)
    if size != image.size:
        image = image.resize(size, Image.Resampling.BICUBIC, reducing_gap=3.0)
    if quality is None:
        mode, data = "raw", image.tobytes()
    else:
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=quality)
        mode, data = "jpg", buffer.getvalue()
    row = np.zeros((), fmt.SAMPLE)  # zeros, because the bytes between the fields are written, too
    row["label"], row["image"] = label, (fmt.MODES[mode], *size, 0)
    return row, data


def _as_rgb(image: Any, name: str) -> Image.Image:
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.shape[2:] not in ((), (1,), (3,)) or image.ndim < 2 or image.size == 0:
            raise ValueError(
                f"{name}: array {image.shape} of {image.dtype}; expected uint8 of shape (H, W), (H, W, 1) or (H, W, 3)"
            )
        image = Image.fromarray(image.squeeze(2) if image.shape[2:] == (1,) else image)
    if not isinstance(image, Image.Image):
        raise TypeError(f"{name}: image is a {type(image).__name__}; expected a PIL image or a uint8 numpy array")
    try:
        return to_rgb(image)
    except (OSError, ValueError) as error:
        raise UnreadableImage(f"{name}: not a usable image ({error})") from error


def _read_headers(
    files: ImageFiles, max_resolution: int, workers: int, progress: bool
) -> tuple[int, dict[int, str], dict[str, list[str]]]:
    """Reads the header of every image file.

    Returns:
        The bytes of all readable images as 8-bit pixels at the size they are stored at; by sample index, why an image
        cannot be used; and the files whose images are converted, by what is changed (see `read_header`).
    """
    raw_bytes, unreadable, all_converted = 0, {}, defaultdict(list)

    def read(index: int) -> tuple[int, list[str]] | UnreadableImage:
        path = files.paths[index]
        try:
            width, height, converted = read_header(path, files.max_pixels)
            width, height = stored_size(width, height, max_resolution, path)
        except UnreadableImage as error:
            return error
        return 3 * width * height, converted

    headers = in_order(read, range(len(files)), workers)
    bar = tqdm(headers, total=len(files), desc=f"checking {files.root.name}", unit="img", disable=not progress)
    for index, header in enumerate(bar):
        if isinstance(header, UnreadableImage):
            unreadable[index] = str(header)
            continue
        raw_bytes += header[0]
        for kind in header[1]:
            all_converted[kind].append(files.paths[index])
    return raw_bytes, unreadable, all_converted


def _refusal(unreadable: dict[int, str]) -> UnreadableImage:
    reasons = list(unreadable.values())
    shown = "; ".join(reasons[:SHOWN]) + f"; and {len(reasons) - SHOWN} more" * (len(reasons) > SHOWN)
    return UnreadableImage(f"{shown} (--skip-unreadable, skip_unreadable=True, leaves such images out and lists them)")


def _check_target(path: Path, overwrite: bool) -> None:
    for target, what in ((path, "the .beton file to write"), (fmt.manifest_path(path), "its manifest")):
        if target.is_dir():
            raise IsADirectoryError(f"{target}: is a folder; remove it or give another name for {what}")
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path}: exists; give another name, or --overwrite (overwrite=True) to replace it")
    for left in path.parent.glob(f"{glob.escape(path.name)}.*.partial"):
        warnings.warn(f"{left}: left by a writer that was killed; delete it", stacklevel=3)


def _write(
    file: BinaryIO, encoded: Iterator[tuple[np.ndarray, bytes] | None], count: int, page: int
) -> tuple[str, np.ndarray] | None:
    """Writes the complete file, the header last, so that an unfinished file can be recognised.

    Space is reserved for the metadata of `count` samples; None in `encoded` stands for one that is left out. `page` is
    in bytes. Returns the SHA-256 of the image data and (N,) the CRC-32 of each image's, or None if there is no sample.
    """
    samples, regions = np.zeros(count, fmt.SAMPLE), np.zeros(count, fmt.REGION)
    checksums = np.zeros(count, fmt.CHECKSUM)
    digest, at, written = hashlib.sha256(), fmt.TABLES_AT + samples.nbytes, 0
    at += -at % page
    for row, data in filter(None, encoded):
        padding = -at % page if at % page + len(data) > page else 0
        at += padding
        file.seek(at)
        file.write(data)
        digest.update(bytes(padding) + data)
        row["image"]["data_ptr"] = at
        samples[written], regions[written], checksums[written] = row, (written, at, len(data)), zlib.crc32(data)
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
    return (digest.hexdigest(), checksums[:written]) if written else None
