"""Writes `.beton` files from image folders and datasets: threads encode, and the file grows in order.

FFCV's own writer hangs when a worker fails, and leaves shared memory behind. This one writes the same format from one
process, and its bytes do not depend on the number of workers.
"""

import base64
import hashlib
import io
import json
import operator
import os
import zlib
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image
from tqdm import tqdm

from ..atomic_files import atomic_writes, explain_full_disk, named_errors, only_writer
from ..image_file import MAX_PIXELS, MIN_SIDE, UnreadableImage, to_rgb
from ..image_folder import check_distinct, list_classes, shorten
from ..threads import available_cpus, in_order
from . import format as fmt
from .sources import Sample, open_samples

MIN_PAGE = 8 << 20  # bytes; FFCV's default. An image lies within one page.
PIXEL_SHAPES = [(), (1,), (2,), (3,), (4,)]  # of an array; with two or four channels, the last is opacity
MAX_RESOLUTION = 16384  # pixels; keeps a page below the 4 GiB that the header can name

Encoded = tuple[np.ndarray, bytes]  # the row of metadata of a sample, without the pointer, and its data


def write_beton(
    source: str | os.PathLike | Sequence[tuple[Any, int]],
    path: str | os.PathLike,
    *,
    mode: str = "raw",
    max_resolution: int = 500,
    max_pixels: int = MAX_PIXELS,
    jpeg_quality: int = 90,
    classes: Sequence[str] | None = None,
    workers: int | None = None,
    skip_unreadable: bool = False,
    overwrite: bool = False,
    progress: bool = True,
) -> fmt.Beton:
    """Writes a dataset to a `.beton`, and its manifest `NAME.beton.json` beside it, and returns its tables.

    The file gets its final name only when it is complete and checked; an error leaves an older file as it was.

    Args:
        source: an image folder (`root/class/image`), `hf:NAME:SPLIT`, tar files of WebDataset (`a.tar::b-{0..9}.tar`),
            or a map-style dataset of (image, label), where an image is a PIL image or a uint8 array (H, W), (H, W, 1)
            or (H, W, 3), and a label a non-negative integer. It is read from several threads unless `workers` is 1.
        path: the file to write; its folder exists.
        mode: "raw" (8-bit pixels, fastest to read) or "jpg".
        max_resolution: larger images are shrunk until no side has more pixels.
        max_pixels: an image file with more pixels is refused; a map-style dataset has its own limit.
        jpeg_quality: 1 to 100.
        classes: class names by label; default: those of the source, such as the attribute `classes` of a dataset.
        workers: encoding threads; default: one for each CPU.
        skip_unreadable: leave out images that cannot be decoded or have no label, and list them in the manifest.
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
    if mode not in fmt.MODES:
        raise ValueError(f"mode {mode!r}: expected {' or '.join(fmt.MODES)}")
    for name, value, low, high in (
        ("max_resolution", max_resolution, MIN_SIDE, MAX_RESOLUTION),
        ("jpeg_quality", jpeg_quality, 1, 100),
        ("workers", workers, 1, 1024),
    ):
        if not low <= value <= high:
            raise ValueError(f"{name} {value}: expected {low} to {high}")
    with only_writer(path):
        if path.exists() and not overwrite:
            raise FileExistsError(f"{path}: exists; give another name, or --overwrite (overwrite=True) to replace it")
        samples, count, names = open_samples(source, max_pixels)
        if count == 0:
            raise ValueError("the dataset to write is empty; expected at least one sample with a label")
        classes = names if classes is None else classes
        classes = None if classes is None else list_classes(classes)
        if moved := [name for name, own in zip(classes or (), names or ()) if name != own and name in names]:
            raise ValueError(f"classes: {moved[0]} has another label in the source, whose classes are {shorten(names)}")
        if not fmt.are_class_names(classes):
            raise ValueError(f"the classes are {classes}; give classes=[...], a distinct string for each label")
        check_distinct("the classes", classes or ())
        limit = len(classes) if classes is not None else fmt.MAX_CLASSES
        quality = jpeg_quality if mode == "jpg" else None
        unreadable: dict[int, str] = {}  # by sample index, why its image cannot be used

        def encode(numbered: tuple[int, Sample]) -> Encoded | None:
            index, (name, read) = numbered
            try:
                with named_errors(Path(name)):
                    sample = read()
                if not isinstance(sample, (tuple, list)) or len(sample) != 2:
                    raise TypeError(f"{name}: it is a {type(sample).__name__}, expected a pair of image and label")
                return _encode(*sample, name, max_resolution, quality, limit)
            except UnreadableImage as error:
                if not skip_unreadable:
                    remedy = "--skip-unreadable (skip_unreadable=True) leaves such images out and lists them"
                    raise UnreadableImage(f"{error}; {remedy}") from None
                unreadable[index] = str(error)
                return None

        page = max(MIN_PAGE, 1 << (4 * max_resolution**2).bit_length())
        with (
            explain_full_disk(path, "write again, elsewhere or with mode 'jpg'"),
            atomic_writes(path, fmt.manifest_path(path)) as (file, beside),
            closing(in_order(encode, enumerate(samples), workers)) as encoded,
        ):
            bar = tqdm(encoded, total=count, desc=f"writing {path.name}", unit="img", disable=not progress)
            digest, checksums = _write(file, bar, count, page)
            if not len(checksums):
                raise UnreadableImage(f"no image of the dataset can be read; the first error: {unreadable[0]}")
            beton = fmt.check_beton(file.name)
            manifest = {
                "samples": beton.num_samples,
                "classes": classes,
                "left_out": [unreadable[index] for index in sorted(unreadable)],
                "class_counts": np.bincount(beton.labels, minlength=len(classes or ())).tolist(),
                "sha256": {"tables": beton.digest, "images": digest, "classes": fmt.digest_of_names(classes)},
                "crc32": base64.b64encode(checksums.tobytes()).decode("ascii"),
                "settings": {"mode": mode, "max_resolution": max_resolution, "jpeg_quality": jpeg_quality},
            }
            beside.write(json.dumps(manifest, indent=1).encode() + b"\n")
        return fmt.check_beton(path)


def _encode(image: Any, label: Any, name: str, max_resolution: int, quality: int | None, num_classes: int) -> Encoded:
    """Encodes a sample as JPEG, or as pixels if `quality` is None."""
    try:
        label = operator.index(label)
    except TypeError:
        raise TypeError(f"{name}: label {label!r} is a {type(label).__name__}; expected an integer") from None
    if not 0 <= label < num_classes:
        raise ValueError(f"{name}: label {label}; expected 0 to {num_classes - 1}")
    image = _as_rgb(image, name)
    shrink = min(1.0, max_resolution / max(image.size))
    size = round(image.width * shrink), round(image.height * shrink)
    if min(size) < MIN_SIDE:
        stored = f"{image.width}x{image.height} pixels are stored as {size[0]}x{size[1]}"
        remedy = f"each side must have at least {MIN_SIDE}; remove the image or raise max_resolution"
        raise UnreadableImage(f"{name}: {stored}, and {remedy}")
    if size != image.size:
        image = image.resize(size, Image.Resampling.BICUBIC, reducing_gap=3.0)
    buffer = io.BytesIO()
    if quality is None:
        buffer.write(image.tobytes())
    else:
        image.save(buffer, "JPEG", quality=quality)
    row = np.zeros((), fmt.SAMPLE)  # zeros, because the bytes between the fields are written, too
    row["label"], row["image"] = label, (fmt.MODES["raw" if quality is None else "jpg"], *size, 0)
    return row, buffer.getvalue()


def _as_rgb(image: Any, name: str) -> Image.Image:
    if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.size and image.shape[2:] in PIXEL_SHAPES:
        image = Image.fromarray(image.squeeze(2) if image.shape[2:] == (1,) else image)
    if not isinstance(image, Image.Image):
        found = f"{image.dtype} {image.shape}" if isinstance(image, np.ndarray) else type(image).__name__
        raise TypeError(f"{name}: image is a {found}; expected a PIL image or a uint8 array of gray or RGB")
    try:
        return to_rgb(image)
    except (OSError, ValueError) as error:
        raise UnreadableImage(f"{name}: not a usable image ({error})") from error


def _write(file: BinaryIO, encoded: Iterable[Encoded | None], count: int, page: int) -> tuple[str, np.ndarray]:
    """Writes the complete file, the header last, so that an unfinished file can be recognised.

    Space is reserved for the metadata of `count` samples; None in `encoded` stands for one that is left out. `page` is
    in bytes. Returns the SHA-256 of the image data and (N,) the CRC-32 of each image's.
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
    return digest.hexdigest(), checksums[:written]
