"""The `.beton` format of FFCV (version 2) for images with integer labels: its tables, and the check of a file.

Only numpy reads the tables: FFCV's own reader hangs or aborts on files that this check refuses. A file has a header, a
descriptor of each field, a row of metadata for each sample, image data in pages, and the allocation table.
"""

import base64
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ..atomic_files import named_errors
from ..image_folder import list_classes, match_classes

VERSION = 2
HEADER = np.dtype(
    [("version", "<u2"), ("num_fields", "<u2"), ("page_size", "<u4"), ("num_samples", "<u8"), ("table", "<u8")]
)
FIELD = np.dtype([("type_id", "<u1"), ("name", "S16"), ("arguments", "V1024")])
IMAGE = np.dtype([("mode", "<u1"), ("width", "<u2"), ("height", "<u2"), ("data_ptr", "<u8")])
SAMPLE = np.dtype([("image", IMAGE), ("label", "<i8")], align=True)
REGION = np.dtype([("sample_id", "<u8"), ("ptr", "<u8"), ("size", "<u8")])
CHECKSUM = np.dtype("<u4")
FIELD_TYPES = (2, 1)  # FFCV's RGBImageField, IntField
MODES = {"jpg": 0, "raw": 1}
MAX_CLASSES = 1 << 24  # a larger label is damage
MAX_DENSITY = 1024  # pixels per byte of JPEG; its codes allow about 170
TABLES_AT = HEADER.itemsize + len(FIELD_TYPES) * FIELD.itemsize


class BetonError(ValueError):
    """A file that is not a complete `.beton` of images and labels; the message names it and says what to do."""


@dataclass(frozen=True)
class Beton:
    """The tables of a checked `.beton`.

    Attributes:
        images: (N,) rows of `IMAGE`.
        labels: (N,) int64, from 0 to `num_classes` - 1.
        sizes: (N,) int64, bytes of each image.
        classes: class names from the manifest beside the file, None without one.
        checksums: (N,) CRC-32 of the data of each image, from the manifest; None if it has none.
        digest: SHA-256 of the tables.
    """

    path: Path
    images: np.ndarray
    labels: np.ndarray
    sizes: np.ndarray
    classes: list[str] | None
    checksums: np.ndarray | None
    digest: str

    @property
    def num_samples(self) -> int:
        """Number of images."""
        return len(self.labels)

    @property
    def num_classes(self) -> int:
        """Number of class names, without them the largest label plus one."""
        return len(self.classes) if self.classes is not None else int(self.labels.max()) + 1

    @property
    def content(self) -> str | None:
        """SHA-256 of the checksums of the images; None without them."""
        return None if self.checksums is None else hashlib.sha256(self.checksums.tobytes()).hexdigest()

    @property
    def notes(self) -> list[str]:
        """Sentences on what a user may not expect: what is lost without a manifest, or without its checksums."""
        if self.checksums is not None:
            return []
        beside = manifest_path(self.path)
        lost = "has no checksums, so that" if beside.is_file() else "is missing, so that class names are unknown, and"
        return [f"{self.path}: {beside.name} {lost} damaged images are not noticed; write the file again"]

    def with_classes(self, classes: Sequence[str]) -> "Beton":
        """The same samples, labelled by `classes`; labels without names are their numbers.

        Raises ValueError if a class with images is not among them.
        """
        classes = list_classes(classes)
        if self.classes is None:
            if self.num_classes > len(classes):
                found = f"its labels have no names and go up to {self.num_classes - 1}"
                raise ValueError(f"{self.path}: {found}, but there are {len(classes)} classes: give a name for each")
            return replace(self, classes=classes)
        present, position = np.unique(self.labels, return_inverse=True)
        index = match_classes(str(self.path), [self.classes[label] for label in present], classes)
        return replace(self, labels=index[position], classes=classes)


def manifest_path(path: Path) -> Path:
    """Path of the manifest of a `.beton`: `NAME.beton.json`."""
    return path.with_name(path.name + ".json")


def check_beton(path: str | os.PathLike, *, images: bool = False) -> Beton:
    """Reads the tables of a `.beton`. Checks that it is complete and consistent, and that a manifest belongs to it.

    Args:
        path: the file.
        images: also compare all image data with the manifest's checksum (minutes for ImageNet).

    Raises:
        FileNotFoundError: there is no such file.
        BetonError: the file is not a `.beton`, is damaged or unfinished, or its manifest describes another file.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; write it with: vilonghorn beton FOLDER {path}")
    with named_errors(path), open(path, "rb") as file:
        samples, regions, digest = _read_tables(path, file)
        sizes = _check_samples(path, samples, regions)
        manifest, checksums = _read_manifest(path, digest, samples["label"])
        if images:
            if manifest is None:
                raise BetonError(f"{path}: image data cannot be checked without {manifest_path(path).name} beside it")
            start, stop = int(regions["ptr"].min()), os.path.getsize(path) - regions.nbytes
            file.seek(start)
            found = hashlib.sha256()
            while left := stop - file.tell():
                found.update(file.read(min(left, 1 << 24)))
            if found.hexdigest() != manifest["sha256"]["images"]:
                raise _damaged(path, "its image data are not those that were written")
    classes = manifest["classes"] if manifest else None
    return Beton(path, samples["image"], samples["label"].astype(np.int64), sizes, classes, checksums, digest)


def _damaged(path: Path, what: str) -> BetonError:
    return BetonError(f"{path}: damaged .beton: {what}; write it again: vilonghorn beton SRC {path} --overwrite")


def _read_tables(path: Path, file: BinaryIO) -> tuple[np.ndarray, np.ndarray, str]:
    """Metadata (N,) of `SAMPLE`, allocation table (N,) of `REGION`, and SHA-256 of all tables."""
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
        raise _damaged(path, f"its size is {size} bytes; its header says {expected}")
    metadata = file.read(num_samples * SAMPLE.itemsize)
    file.seek(table)
    allocation = file.read()
    digest = hashlib.sha256(start + metadata + allocation).hexdigest()
    return np.frombuffer(metadata, SAMPLE), np.frombuffer(allocation, REGION), digest


def _check_samples(path: Path, samples: np.ndarray, regions: np.ndarray) -> np.ndarray:
    """Checks every sample. Returns (N,) bytes of each image, from the allocation table, whose rows are in any order."""
    regions = regions[np.argsort(regions["sample_id"], kind="stable")]
    if (regions["sample_id"] != np.arange(len(samples), dtype=np.uint64)).any():
        raise _damaged(path, "its allocation table does not have one row for each sample")
    image, label, start, size = samples["image"], samples["label"], regions["ptr"], regions["size"]
    first, stop = TABLES_AT + samples.nbytes, os.path.getsize(path) - regions.nbytes
    width, height, raw = image["width"].astype(np.uint64), image["height"], image["mode"] == MODES["raw"]
    pixels = width * height
    for wrong, what in (
        (image["mode"] > max(MODES.values()), "an unknown mode"),
        (pixels < 1, "an empty image"),
        (label < 0, "a negative label"),
        (label >= MAX_CLASSES, f"a label above {MAX_CLASSES - 1}"),
        (start != image["data_ptr"], "another position in the allocation table than in its metadata"),
        ((start < first) | (size < 1) | (size > stop) | (start > stop - size), "its image outside of the image data"),
        (raw & (size != 3 * pixels), "an uncompressed image whose size is not 3 x width x height"),
        (~raw & (pixels > MAX_DENSITY * size), "too few bytes for a JPEG of its pixels"),  # FFCV would allocate them
    ):
        if wrong.any():
            i = int(wrong.argmax())
            sample = f"sample {i} (label {label[i]}, {width[i]}x{height[i]} pixels, {size[i]} bytes)"
            raise _damaged(path, f"{sample} has {what}")
    return size.astype(np.int64)


def _read_manifest(path: Path, digest: str, labels: np.ndarray) -> tuple[dict | None, np.ndarray | None]:
    """The manifest beside a file, and the checksums of its samples; older manifests have none."""
    beside = manifest_path(path)
    if not beside.is_file():
        return None, None
    try:
        manifest = json.loads(beside.read_text(encoding="utf-8"))
        tables, _, classes = manifest["sha256"]["tables"], manifest["sha256"]["images"], manifest["classes"]
        names, crc32 = manifest["sha256"].get("classes"), manifest.get("crc32")
        checksums = None if crc32 is None else np.frombuffer(base64.b64decode(crc32, validate=True), CHECKSUM)
        if not are_class_names(classes):
            raise ValueError("the classes are not a list of distinct names")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BetonError(f"{beside}: not the manifest of a .beton ({error!r}); delete it or write both again") from None
    for wrong, problem in (
        (tables != digest, f"does not describe {path.name}, but another file"),
        (names not in (None, digest_of_names(classes)), "its class names are not those that were written"),
        (classes is not None and len(classes) <= labels.max(), f"fewer class names than labels, up to {labels.max()}"),
        (checksums is not None and len(checksums) != len(labels), f"expected {len(labels)} checksums, one an image"),
    ):
        if wrong:
            raise BetonError(f"{beside}: {problem}; delete it or write both again")
    return manifest, checksums


def are_class_names(classes: object) -> bool:
    """Whether class names are None or a list of distinct strings."""
    is_list = isinstance(classes, list) and all(isinstance(name, str) for name in classes)
    return classes is None or (is_list and len(set(classes)) == len(classes))


def digest_of_names(classes: list[str] | None) -> str:
    """SHA-256 of class names, for the manifest."""
    return hashlib.sha256(json.dumps(classes).encode()).hexdigest()
