"""The samples of what a `.beton` is written from, once and in order: folders, datasets, tables and tar files."""

import os
import re
import tarfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from io import BytesIO
from itertools import chain
from typing import Any

from PIL import Image

from ..image_file import EXTENSIONS, UnreadableImage, printable, read_image
from ..image_folder import ImageFolder

SKIPPED = re.compile(r"^__[^/]*__/|(^|/)\.[^_/][^/]*$")  # names that webdataset does not read; ._NAME is of a system
MAX_MEMBER = 1 << 30  # bytes of a file in a tar file, which is read into memory
MAX_PADDING = 1 << 20  # bytes of zeros that may end a tar file; tar itself writes up to 10 KiB

Sample = tuple[str, Callable[[], tuple[Any, Any]]]  # a name, and a function that reads the image and the label
Samples = tuple[Iterator[Sample], int, list[str] | None]  # and at most how many there are, and the names of classes


def open_samples(source: Any, max_pixels: int) -> Samples:
    """Opens an image folder, a map-style dataset, `hf:NAME:SPLIT`, or tar files: `a.tar::b-{0..9}.tar`.

    Raises ImportError if a library is missing, and OSError or ValueError if the source is, or is not as described.
    """
    path = os.fspath(source) if isinstance(source, (str, os.PathLike)) else None
    try:
        if path and path.startswith("hf:"):
            return _open_table(path, max_pixels)
        if path and path.endswith(".tar"):
            return _open_tars(path, max_pixels)
    except ImportError as error:
        raise ImportError(f"{source}: needs a library ({error}): pip install datasets webdataset") from error
    if path is not None:
        source = ImageFolder(path, max_pixels)
        for note in source.notes:
            warnings.warn(note, stacklevel=3)
    paths = source.paths if isinstance(source, ImageFolder) else (f"sample {i}" for i in range(len(source)))
    samples = ((printable(path), partial(source.__getitem__, index)) for index, path in enumerate(paths))
    return samples, len(source), getattr(source, "classes", None)


def _read(name: str, file: bytes | str | None, label: Any, max_pixels: int) -> tuple[Image.Image, int]:
    if file is None:
        raise UnreadableImage(f"{name}: it has no image, or more than one")
    if not isinstance(label, int) or label < 0:
        raise UnreadableImage(f"{name}: its label is {label!r}; expected an integer from 0")
    content = BytesIO(file) if isinstance(file, bytes) else None
    return read_image(name if content else file, max_pixels, content), label


def _open_table(source: str, max_pixels: int) -> Samples:
    import datasets

    expected = f"{source}: expected hf:NAME:SPLIT, such as hf:cifar10:train"
    if (match := re.fullmatch(r"hf:([^\[]+):([^:\[]+(\[.*)?)", source)) is None:  # SPLIT may be train[:90%]
        raise ValueError(expected)
    try:
        table = datasets.load_dataset(match[1], split=match[2])
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"{source} cannot be loaded ({reason}); expected a data set of the Hub or a folder") from error
    kinds = table.features
    images = [column for column, kind in kinds.items() if isinstance(kind, datasets.Image)]
    labels = [column for column, kind in kinds.items() if isinstance(kind, datasets.ClassLabel) or column == "label"]
    if not images or not labels:
        raise ValueError(f"{source}: expected a column of images and one of classes; found {', '.join(kinds)}")
    image, label = images[0], labels[0]
    if len(images + labels) > 2:
        warnings.warn(f"{source}: {image} and {label} are read, of the columns {', '.join(kinds)}", stacklevel=4)
    rows = table.select_columns([image, label]).cast_column(image, datasets.Image(decode=False))

    def samples() -> Iterator[Sample]:
        for number, row in enumerate(rows):
            name, file = f"{source}, row {number}", row[image] or {"bytes": None, "path": None}
            yield name, partial(_read, name, file["bytes"] or file["path"], row[label], max_pixels)

    return samples(), len(rows), getattr(kinds[label], "names", None)


def _open_tars(source: str, max_pixels: int) -> Samples:
    from webdataset import shardlists

    parts = ([part] if os.path.exists(part) else shardlists.expand_urls(part) for part in source.split("::"))
    paths = [*chain.from_iterable(parts)]
    if missing := [path for path in paths if not os.path.isfile(path)]:
        raise FileNotFoundError(f"there is no tar file {', '.join(map(printable, missing[:10]))}; expected its path")
    count = sum(map(count_labels, paths))
    return map(partial(tar_sample, max_pixels), read_tars(paths)), count, None


def read_tars(paths: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The samples of tar files, as webdataset groups their files.

    The files are opened here, because `webdataset.WebDataset` takes names such as `pipe:NAME` for commands.
    """
    from webdataset import tariterators

    opened = ({"url": path, "stream": open(path, "rb")} for path in paths)
    return tariterators.group_by_keys(tariterators.tar_file_expander(opened))


def tar_sample(max_pixels: int, parts: dict[str, Any]) -> Sample:
    """The name and the reader of a sample of webdataset: contents by extension, `__url__` and `__key__`."""
    images = [content for extension, content in parts.items() if f".{extension}" in EXTENSIONS]
    label = parts.get("cls", b"").strip()
    name = printable(f"{parts['__url__']}: {parts['__key__']}")
    image = images[0] if len(images) == 1 else None
    return name, partial(_read, name, image, int(label) if label.isdigit() and len(label) < 10 else label, max_pixels)


def count_labels(path: str) -> int:
    """Number of `.cls` files in a tar file, which is checked to its end: tarfile stops at a damaged header silently."""
    names: set[str] = set()
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                tar.members.clear()  # they would fill the memory
                if member.name in names or not (member.isfile() or member.isdir()):
                    raise tarfile.TarError(f"{printable(member.name)} is there twice, or a link")
                if SKIPPED.search(member.name) and member.name.lower().endswith((".cls", *EXTENSIONS)):
                    raise tarfile.TarError(f"{printable(member.name)} has a name that webdataset leaves out")
                if member.issparse() or member.size > MAX_MEMBER:
                    raise tarfile.TarError(f"{printable(member.name)} is sparse, or has more than {MAX_MEMBER:,} bytes")
                names.add(member.name)
            tar.fileobj.seek(tar.offset)
            end = tar.fileobj.read(MAX_PADDING + 1)
            if any(end) or not tarfile.BLOCKSIZE <= len(end) <= MAX_PADDING:
                raise tarfile.TarError(f"cut off or damaged after {tar.offset} bytes")
    except tarfile.TarError as error:
        raise ValueError(f"{path}: not a complete tar file without compression ({error})") from error
    return sum(name.lower().endswith(".cls") for name in names)
