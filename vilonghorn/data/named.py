"""Images of a name, not a path: `hfds/NAME:SPLIT` of Hugging Face's library datasets, `wds/FILES` of WebDataset.

Both are read at any position, so that they have the order, the augmentation and the resume of an image folder.
"""

import glob
import hashlib
import os
import tarfile
from collections.abc import Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from .images import EXTENSIONS, MAX_PIXELS, ImageFolder, match_classes, read_image


class NamedImages(ImageFolder):
    """An `ImageFolder` of the images of a name; without `labelled`, all labels are 0.

    Raises FileNotFoundError or ImportError if there are no such files or no such library, and ValueError if the name
    cannot be read, a label is missing, or a class is not among `classes`.
    """

    def __init__(
        self, source: str, max_pixels: int = MAX_PIXELS, classes: Sequence[str] | None = None, labelled: bool = True
    ) -> None:
        self.path, self.max_pixels, self.notes, self.paths = Path(source), max_pixels, [], []
        kind, _, rest = source.partition("/")
        self.read, labels, names, keys = KINDS[kind](source, rest, labelled)
        wrong = {label for label in labels if not isinstance(label, int) or label < 0}
        if wrong or not labels:
            raise ValueError(f"{source}: expected images, each with a label from 0; found labels {[*wrong][:5]}")
        self.digest = hashlib.sha256("\n".join([*keys, *map(str, labels)]).encode()).hexdigest()
        names = names or [str(label) for label in range(max(labels) + 1)]
        self.classes = list(classes or names) if labelled else []
        self.labels = match_classes(source, names, self.classes or names)[labels]

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        image = self.read(index) or {"path": None, "bytes": b""}
        file = None if image["bytes"] is None else BytesIO(image["bytes"])
        return read_image(image["path"] or str(self.path), self.max_pixels, file), int(self.labels[index])


def is_named(source: str | os.PathLike) -> bool:
    """Whether data are given by a name of `NamedImages`."""
    return os.fspath(source).partition("/")[0] in KINDS


def _open_hfds(source: str, rest: str, labelled: bool) -> tuple[Any, ...]:
    """A reader of images by index, their labels, the names of the classes, and names of images, as `_open_wds`."""
    whole, bracket, part = rest.partition("[")  # of NAME:SPLIT[:90%]
    name, _, split = whole.rpartition(":")
    split += bracket + part
    try:
        import datasets

        if not (name and split):
            raise ValueError("it has no split")
        is_saved = Path(name, split, "state.json").is_file()
        table = datasets.load_from_disk(Path(name, split)) if is_saved else datasets.load_dataset(name, split=split)
    except ImportError as error:
        raise ImportError(f"{source}: needs the library datasets ({error}): pip install datasets") from error
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"{source}: expected hfds/NAME:SPLIT, such as hfds/cifar10:train ({reason})") from error
    kinds = table.features
    images = [column for column, kind in kinds.items() if isinstance(kind, datasets.Image)]
    classes = [column for column, kind in kinds.items() if isinstance(kind, datasets.ClassLabel) or column == "label"]
    if not images or (labelled and not classes):
        raise ValueError(f"{source}: expected a column of images and one of classes; found {', '.join(kinds)}")
    labels, names = (table[classes[0]][:], getattr(kinds[classes[0]], "names", None)) if labelled else ([], None)
    table = table.select_columns(images[:1]).cast_column(images[0], datasets.Image(decode=False))
    return table[images[0]].__getitem__, labels or [0] * len(table), names, []


def _open_wds(source: str, rest: str, labelled: bool) -> tuple[Any, ...]:
    files = sorted(glob.glob(os.path.join(rest, "*.tar") if os.path.isdir(rest) else rest))
    if not files:
        raise FileNotFoundError(f"{source}: no such tar files; expected wds/FOLDER, or a pattern as wds/x/train-*.tar")
    places, labels = {}, {}
    for file in files:
        try:
            with tarfile.open(file, "r:") as tar:
                for member in filter(tarfile.TarInfo.isfile, tar):
                    stem, _, extension = os.path.basename(member.name).partition(".")
                    key = os.path.join(os.path.basename(file), os.path.dirname(member.name), stem)
                    if extension == "cls":
                        labels[key] = int(tar.extractfile(member).read())
                    elif f".{extension}".lower() in EXTENSIONS:
                        places.setdefault(key, (file, member.offset_data, member.size))
        except (tarfile.TarError, ValueError) as error:
            raise ValueError(f"{file}: not a tar file of WebDataset, without compression ({error})") from error
    return partial(_read_member, [*places.items()]), [labels.get(k) if labelled else 0 for k in places], None, places


def _read_member(places: list[tuple[str, tuple[str, int, int]]], index: int) -> dict[str, Any]:
    name, (path, start, size) = places[index]
    with open(path, "rb") as file:
        file.seek(start)
        return {"path": name, "bytes": file.read(size)}


KINDS = {"hfds": _open_hfds, "wds": _open_wds}
