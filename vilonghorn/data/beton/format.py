"""The `.beton` format of FFCV (version 2) for images with integer labels: its tables, and the check of a whole file.

Reads tables and no pixel, with numpy alone, because FFCV's own reader hangs or aborts on files that this refuses.
A file is: header, one descriptor a field, one row of metadata a sample, image data in pages, the allocation table.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

VERSION = 2
HEADER = np.dtype(
    [("version", "<u2"), ("num_fields", "<u2"), ("page_size", "<u4"), ("num_samples", "<u8"), ("table", "<u8")]
)
FIELD = np.dtype([("type_id", "<u1"), ("name", "S16"), ("arguments", "V1024")])
IMAGE = np.dtype([("mode", "<u1"), ("width", "<u2"), ("height", "<u2"), ("data_ptr", "<u8")])
SAMPLE = np.dtype([("image", IMAGE), ("label", "<i8")], align=True)
REGION = np.dtype([("sample_id", "<u8"), ("ptr", "<u8"), ("size", "<u8")])
FIELD_TYPES = (2, 1)  # FFCV's RGBImageField, IntField
MODES = {"jpg": 0, "raw": 1}
MAX_CLASSES = 1 << 24  # far above any dataset's: a larger label is damage, and would ask for a head of terabytes
MAX_DENSITY = 1024  # pixels a byte of JPEG; two bits a block, fewer than which its codes do not allow, make 170
TABLES_AT = HEADER.itemsize + len(FIELD_TYPES) * FIELD.itemsize


class BetonError(ValueError):
    """A file that is not a whole `.beton` of images and labels; the message names it and says what to do."""


@dataclass(frozen=True)
class Beton:
    """The tables of a checked `.beton`.

    Attributes:
        path: the file.
        fields: names of the image and of the label field.
        images: (N,) rows of `IMAGE`.
        labels: (N,) int64, from 0 to `num_classes` - 1.
        sizes: (N,) int64, bytes that each image takes.
        classes: class names from the manifest beside the file, None without one.
        digest: SHA-256 of the tables, which hold the labels and the place and size of every image.
    """

    path: Path
    fields: tuple[str, str]
    images: np.ndarray
    labels: np.ndarray
    sizes: np.ndarray
    classes: list[str] | None
    digest: str

    @property
    def num_samples(self) -> int:
        return len(self.labels)

    @property
    def num_classes(self) -> int:
        return len(self.classes) if self.classes is not None else int(self.labels.max()) + 1


def manifest_path(path: Path) -> Path:
    """Where the manifest of a `.beton` lies: `NAME.beton.json`."""
    return path.with_name(path.name + ".json")


def check_beton(path: str | os.PathLike, *, images: bool = False) -> Beton:
    """Checks that a `.beton` is whole and consistent, and that its manifest, where there is one, belongs to it.

    Args:
        path: the file.
        images: also read all image data and compare them with the manifest's checksum (minutes for ImageNet).

    Returns:
        Its tables.

    Raises:
        FileNotFoundError: there is no such file.
        BetonError: the file is foreign, unfinished, truncated, inconsistent, or not what its manifest describes.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file; write it with: python -m vilonghorn.data.beton FOLDER {path}")
    if not path.is_file():
        raise BetonError(f"{path}: not a file; expected a .beton")
    with open(path, "rb") as file:
        fields, samples, regions = _read_tables(path, file)
        image, sizes = samples["image"], _region_sizes(path, samples, regions)
        smallest = min(image["width"].min(), image["height"].min())
        if image["mode"].max() > max(MODES.values()) or smallest < 1 or samples["label"].min() < 0:
            raise _damaged(path, "a sample has an unknown mode, an empty image or a negative label")
        largest = int(samples["label"].argmax())
        if (label := samples["label"][largest]) >= MAX_CLASSES:
            raise _damaged(path, f"sample {largest} has label {label}, above the {MAX_CLASSES - 1} that is allowed")
        raw = image["mode"] == MODES["raw"]
        if (sizes[raw] != 3 * image["width"][raw].astype(np.int64) * image["height"][raw]).any():
            raise _damaged(path, "the size of an uncompressed image is not 3 x width x height")
        pixels = image["width"].astype(np.int64) * image["height"]
        dense = np.flatnonzero(~raw & (pixels > MAX_DENSITY * sizes))
        if len(dense) > 0:  # its reader would ask for gigabytes
            which, held = int(dense[0]), int(sizes[dense[0]])
            width, height = (int(image[side][which]) for side in ("width", "height"))
            raise _damaged(path, f"sample {which} is to have {width}x{height} pixels in {held} bytes of JPEG")
        digest = tables_digest(file)
        manifest = _read_manifest(path, digest, samples["label"])
        if images:
            if manifest is None:
                raise BetonError(f"{path}: image data cannot be checked without {manifest_path(path).name} beside it")
            if images_digest(file) != manifest["sha256"]["images"]:
                raise _damaged(path, "its image data are not those that were written")
    classes = manifest["classes"] if manifest else None
    return Beton(path, fields, image, samples["label"].astype(np.int64), sizes, classes, digest)


def _damaged(path: Path, what: str) -> BetonError:
    command = f"python -m vilonghorn.data.beton SRC {path} --overwrite"
    return BetonError(f"{path}: damaged .beton: {what}; write it again: {command}")


def _read_tables(path: Path, file: BinaryIO) -> tuple[tuple[str, str], np.ndarray, np.ndarray]:
    """Names of the fields, metadata (N,) of `SAMPLE`, allocation table (N,) of `REGION`; nothing of them is missing."""
    size = os.fstat(file.fileno()).st_size
    start = file.read(TABLES_AT)
    header = np.frombuffer(start[: HEADER.itemsize].ljust(HEADER.itemsize, b"\0"), HEADER)[0]
    num_samples, table = int(header["num_samples"]), int(header["table"])
    if header["version"] != VERSION or not 1 <= header["num_fields"] <= 64:
        what = "an empty file" if size == 0 else "its first bytes are not the header of one"
        raise BetonError(f"{path}: not a .beton file of version {VERSION}: {what}; give a .beton or an image folder")
    if size < TABLES_AT:
        raise _damaged(path, f"cut off after {size} bytes, inside the header")
    fields = np.frombuffer(start, FIELD, len(FIELD_TYPES), HEADER.itemsize)
    if header["num_fields"] != len(FIELD_TYPES) or tuple(fields["type_id"]) != FIELD_TYPES:
        raise BetonError(f"{path}: its fields are not an RGB image and an integer label, in this order; write it so")
    if table == 0:
        raise _damaged(path, "unfinished, because its writer did not complete")
    expected = table + num_samples * REGION.itemsize
    if num_samples == 0:
        raise _damaged(path, "it has no sample")
    if size != expected or TABLES_AT + num_samples * SAMPLE.itemsize > table:
        raise _damaged(path, f"{size} bytes long where its header asks for {expected}")
    samples = np.fromfile(file, SAMPLE, num_samples)
    file.seek(table)
    image, label = (name.decode("ascii", "replace") for name in fields["name"])
    if not (image.isascii() and label.isascii() and image != label):  # FFCV would fail on them, each in its own way
        raise _damaged(path, f"its fields are called {image!r} and {label!r}, not by two names in ASCII")
    return (image, label), samples, np.fromfile(file, REGION, num_samples)


def _region_sizes(path: Path, samples: np.ndarray, regions: np.ndarray) -> np.ndarray:
    """(N,) bytes of each sample's image, by the allocation table, whose rows are in any order."""
    header_end, table = TABLES_AT + samples.nbytes, os.path.getsize(path) - regions.nbytes
    by_sample = regions[np.argsort(regions["sample_id"], kind="stable")]
    if (by_sample["sample_id"] != np.arange(len(samples), dtype=np.uint64)).any():
        raise _damaged(path, "its allocation table does not have one row for each sample")
    start, size = by_sample["ptr"], by_sample["size"]
    if (start != samples["image"]["data_ptr"]).any():
        raise _damaged(path, "its allocation table and its samples disagree on where the images are")
    if (start < header_end).any() or (size < 1).any() or (size > table).any() or (start > table - size).any():
        raise _damaged(path, "an image lies outside the image data")
    return size.astype(np.int64)


def _read_manifest(path: Path, digest: str, labels: np.ndarray) -> dict | None:
    beside = manifest_path(path)
    if not beside.exists():
        return None
    try:
        manifest = json.loads(beside.read_text(encoding="utf-8"))
        matches = manifest["sha256"]["tables"] == digest
        classes, counts, _ = manifest["classes"], manifest["class_counts"], manifest["sha256"]["images"]
    except (ValueError, KeyError, TypeError) as error:
        raise BetonError(f"{beside}: not the manifest of a .beton ({error!r}); delete it or write both again") from None
    if not matches:
        raise BetonError(f"{path}: not the file that {beside.name} describes; delete the manifest or write both again")
    if (problem := class_names_problem(classes)) is not None:
        raise BetonError(f"{beside}: {problem}; delete it or write both again")
    if classes is not None and len(classes) <= labels.max():
        what = f"{len(classes)} class names for labels up to {labels.max()}"
        raise BetonError(f"{beside}: {what}; delete it or write both again")
    if counts != np.bincount(labels, minlength=len(classes or ())).tolist():
        raise BetonError(f"{beside}: its class_counts are not those of the labels; delete it or write both again")
    return manifest


def class_names_problem(classes: object) -> str | None:
    """What is wrong with class names, which are a list of distinct strings, or None for want of names."""
    if classes is None:
        return None
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        return "the classes are not a list of distinct names"
    if len(set(classes)) < len(classes):
        twice = next(name for i, name in enumerate(classes) if name in classes[:i])
        return f"the classes are not distinct names: {twice!r} is there twice"
    return None


def tables_digest(file: BinaryIO) -> str:
    """SHA-256 of all but the image data of an open `.beton`: header, fields, metadata, allocation table."""
    file.seek(0)
    header = np.frombuffer(file.read(HEADER.itemsize), HEADER)[0]
    file.seek(0)
    digest = hashlib.sha256(file.read(TABLES_AT + int(header["num_samples"]) * SAMPLE.itemsize))
    file.seek(int(header["table"]))
    digest.update(file.read())
    return digest.hexdigest()


def images_digest(file: BinaryIO) -> str:
    """SHA-256 of an open `.beton` from its first image to its allocation table, padding in between included."""
    file.seek(0)
    header = np.frombuffer(file.read(HEADER.itemsize), HEADER)[0]
    file.seek(TABLES_AT)
    samples = np.frombuffer(file.read(int(header["num_samples"]) * SAMPLE.itemsize), SAMPLE)
    file.seek(int(samples["image"]["data_ptr"].min()))
    left, digest = int(header["table"]) - file.tell(), hashlib.sha256()
    while left > 0:
        chunk = file.read(min(left, 1 << 24))
        digest.update(chunk)
        left -= len(chunk)
    return digest.hexdigest()
