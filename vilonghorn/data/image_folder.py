"""Image folders (`root/class/image.jpg`).

The writer of `.beton` files and the folder loader both use it, so that they have the same samples in the same order.
"""

import copy
import hashlib
import os
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from PIL import Image

from .image_file import EXTENSIONS, MAX_PIXELS, printable, read_image

# Folders and files that systems and archivers add, beside hidden ones.
ADDED = {"@eadir", "__macosx", "#recycle", "$recycle.bin", "lost+found", "system volume information"}
ADDED |= {"thumbs.db", "desktop.ini"}
Seen = dict[tuple[int, int], str]  # folders by device and inode, with the folder that they were found in
TRAIN, HELD_OUT = {"train", "training"}, {"val", "valid", "validation", "test", "testing", "dev", "eval", "holdout"}


class ImageFolder:
    """A map-style dataset of (RGB image, label) over `root/class/**/image`, both levels sorted as strings.

    An image is opened when it is indexed. See `list_images` for the files that are taken.

    Args:
        root: a folder with one folder of images for each class.
        max_pixels: width times height above which an image is refused when it is opened.
        classes: class names by label, of which some may have no folder or no image. Default: the names of the folders,
            each of which must have an image.

    Attributes:
        classes: class names by label.
        paths: image files.
        labels: (N,) int64.
        digests: (N, 16) uint8 of the content of each file; None: no `ImageCheck` has read them.
        notes: sentences on what a user may not expect: files that are left out, folders of a wrong level.

    Raises:
        FileNotFoundError, NotADirectoryError: there is no such folder.
        ValueError: it has no class folders, has the splits of a dataset, one of its classes has no image, or is not
            among `classes`.
    """

    def __init__(self, root: str | os.PathLike, max_pixels: int = MAX_PIXELS, classes: Sequence[str] | None = None):
        root = Path(root)
        if not root.is_dir():
            kind, what = (NotADirectoryError, "not a") if root.exists() else (FileNotFoundError, "no such")
            raise kind(f"{root}: {what} folder; expected one with a folder of images for each class")
        self.path, self.max_pixels, self.notes = root, max_pixels, []
        self.digests: np.ndarray | None = None
        # The same names and order in every locale and on every system.
        names = sorted((os.fsencode(name).decode("utf-8", "surrogateescape"), name) for name in _folders(root))
        folders = {label: root / name for label, name in names}
        if not folders:
            expected = f"expected {root}/CLASS/IMAGE for each class"
            hint = "; images without classes are for vilonghorn pretrain" * any(map(is_image, os.listdir(root)))
            raise ValueError(f"{root}: no class folders in it; {expected}{hint}")
        _refuse_splits(root, folders)
        check_distinct(str(root), [*folders])
        seen: Seen = {}
        found, left_out = zip(*(list_images(folder, seen) for folder in folders.values()))
        empty = [name for name, files in zip(folders, found) if not files]
        if empty and (classes is None or len(empty) == len(folders)):
            remedy = f"add images ({' '.join(EXTENSIONS)}) or remove the folder"
            raise ValueError(f"{root}: no image in class folder {shorten(empty)}; {remedy}")
        self.classes = list(folders) if classes is None else list_classes(classes)
        index = match_classes(str(root), [name for name in folders if name not in empty], self.classes)
        self.paths = [path for files in found for path in files]
        self.labels = np.repeat(index, [len(files) for files in found if files])
        self._add_notes([*folders.values()], sum(left_out, Counter()))

    def _add_notes(self, folders: list[Path], left_out: Counter[str]) -> None:
        beside = sorted(name for name in os.listdir(self.path) if (self.path / name).is_file() and is_image(name))
        if beside:
            left_out[f"beside the class folders ({shorten(beside)})"] = len(beside)
        if left_out:
            self.notes.append(f"{self.path}: {describe_left_out(len(self.paths), left_out)}")
        doubts = [f"has one class only, {printable(folders[0].name)}"] * (self.num_classes == 1)
        direct = {str(folder) for folder in folders}
        if not any(os.path.dirname(path) in direct for path in self.paths):
            inner = printable(str(folders[0]))
            level = f"give {inner} if the classes are in it" if len(folders) == 1 else "expected images in them"
            doubts.append(f"its class folders have folders only; {level}")
        if doubts:
            self.notes.append(f"{self.path}: {' and '.join(doubts)}")

    @property
    def num_classes(self) -> int:
        """Number of class names."""
        return len(self.classes)

    @property
    def names(self) -> list[str]:
        """The image files, relative to the folder."""
        start = len(self.paths[0]) - len(os.path.relpath(self.paths[0], self.path)) if self.paths else 0
        return [path[start:] for path in self.paths]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the names of the files."""
        return hashlib.sha256("\n".join(self.names).encode(errors="surrogateescape")).hexdigest()

    @property
    def content(self) -> str | None:
        """SHA-256 of the images, in order; None: no `ImageCheck` has read them."""
        return None if self.digests is None else hashlib.sha256(self.digests.tobytes()).hexdigest()

    def select(self, chosen: np.ndarray) -> "ImageFolder":
        """The images at these positions, or where `chosen` (N,) is True, with all class names and notes."""
        subset = copy.copy(self)
        subset.__dict__.pop("digest", None)
        positions = np.arange(len(self.paths))[chosen]
        subset.paths, subset.labels = [self.paths[i] for i in positions], self.labels[positions]
        subset.digests = None if self.digests is None else self.digests[positions]
        return subset

    def split(self, fraction: float, seed: int = 0) -> tuple["ImageFolder", "ImageFolder"]:
        """Splits the images of each class at random: all but `fraction`, and that fraction, at least one of each class.

        The images have `digests`, which decide with the seed, so that other names give the same split. Equal images are
        in the same part. A class of one image has it in the first part, which has the notes.
        """
        key = hashlib.sha256(str(seed).encode()).digest()
        order = [hashlib.sha256(key + digest.tobytes()).digest() for digest in self.digests]
        held_out: set[bytes] = set()
        classes = [sorted({order[i] for i in np.flatnonzero(self.labels == label)}) for label in np.unique(self.labels)]
        for own in classes:
            held_out.update(own[: min(max(1, round(fraction * len(own))), len(own) - 1)])
        for own in classes:
            if held_out.issuperset(own):  # copies in another class have taken all
                held_out.remove(own[0])
        chosen = np.array([value in held_out for value in order])
        first, second = self.select(~chosen), self.select(chosen)
        second.notes = []
        return first, second

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return read_image(self.paths[index], self.max_pixels), int(self.labels[index])


class UnlabelledFolder(ImageFolder):
    """An `ImageFolder` of the images at any depth of a folder, or in it, whose labels are 0.

    `classes` are the folders in it that have images, for a message; the argument is not used.
    """

    def __init__(self, root: str | os.PathLike, max_pixels: int = MAX_PIXELS, classes: Sequence[str] | None = None):
        self.path, self.max_pixels, self.notes, self.digests = Path(root), max_pixels, [], None
        _refuse_splits(self.path, _folders(self.path))
        self.paths, left_out = list_images(root)
        if not self.paths:
            raise ValueError(f"{root}: no image in it, at any depth; expected files {' '.join(EXTENSIONS)}")
        if left_out:
            self.notes.append(f"{root}: {describe_left_out(len(self.paths), left_out)}")
        self.classes = sorted({name.split(os.sep)[0] for name in self.names if os.sep in name})
        self.labels = np.zeros(len(self.paths), np.int64)


def list_classes(classes: Iterable[str]) -> list[str]:
    """Class names by label, as a list. Raises ValueError for one text, a set or a dictionary, or other names."""
    has_order = isinstance(classes, Iterable) and not isinstance(classes, (str, set, frozenset, Mapping))
    names = list(classes) if has_order else []
    if not has_order or not all(isinstance(name, str) for name in names):
        raise ValueError(f"classes is {classes!r}, expected a list of names, by label")
    return [str(name) for name in names]  # numpy's are of a class of their own


def match_classes(source: str, names: Sequence[str], classes: Sequence[str]) -> np.ndarray:
    """(len(names),) int64: the index of each name in `classes`. Equivalent Unicode forms (NFC) are the same name.

    Raises ValueError if a name of `source` is not among them, or is there twice.
    """
    known = [unicodedata.normalize("NFC", name) for name in classes]
    counts = Counter(known)
    if same := [name for name in names if counts[unicodedata.normalize("NFC", name)] > 1]:
        given = f"several classes {shorten(same)} among those given, {shorten(classes)}"
        raise ValueError(f"{source}: there are {given}: rename all but one")
    labels = {name: label for label, name in enumerate(known)}
    found = [labels.get(unicodedata.normalize("NFC", name), -1) for name in names]
    if unknown := [name for name, label in zip(names, found) if label < 0]:
        similar = {_appearance(name): name for name in classes}
        looks = [f"{name!a} looks like {similar[key]!a}" for name in unknown if (key := _appearance(name)) in similar]
        known = f"in the training data or the model, which have {shorten(classes)}"
        hint = f" ({shorten(looks)})" if looks else ""
        raise ValueError(f"{source}: there is no class {shorten(unknown)} {known}; remove or rename it{hint}")
    return np.array(found, np.int64)


def check_distinct(source: str, classes: Iterable[str]) -> None:
    """Raises ValueError if two class names look equal: they differ in Unicode forms, spaces or invisible characters."""
    groups: dict[str, list[str]] = {}
    for name in classes:
        groups.setdefault(_appearance(name), []).append(ascii(name))
    if same := [" and ".join(names) for names in groups.values() if len(names) > 1]:
        raise ValueError(f"{source}: the class names {'; '.join(same)} look equal; merge or rename them")


def _appearance(name: str) -> str:
    """A class name without what one cannot see: compatible characters are one, invisible ones are gone."""
    visible = (c for c in unicodedata.normalize("NFKC", name) if unicodedata.category(c) not in ("Cf", "Cc"))
    return " ".join("".join(visible).split())


def is_image(name: str) -> bool:
    """Whether a file with this name is taken for an image."""
    return name.lower().endswith(EXTENSIONS) and not _is_added(name)


def list_images(folder: str | os.PathLike, seen: Seen | None = None) -> tuple[list[str], Counter[str]]:
    """The image files in a folder at any depth, sorted; and by extension the number of files that are left out.

    Links are followed. Hidden files and folders do not count, nor those of systems and archivers, such as `__MACOSX`.
    Raises ValueError if a link leads above `folder`, or to what an earlier call with `seen` has read, and OSError if a
    folder cannot be read.
    """

    def fail(error: OSError) -> None:
        raise error  # os.walk would leave the folder out

    found: list[str] = []
    left_out: Counter[str] = Counter()
    seen, own, above = {} if seen is None else seen, os.fspath(folder), os.path.dirname(os.path.realpath(folder))
    for parent, folders, files in os.walk(folder, onerror=fail, followlinks=True):
        status = os.stat(parent)
        key = status.st_dev, status.st_ino
        if status.st_ino and key in seen:
            if seen[key] != own:
                what = f"{parent} is the same folder as {seen[key]}, or one in it"
                raise ValueError(f"{printable(what)}: its images would be read twice; remove the link")
            folders.clear()
            continue
        seen[key] = own
        folders[:] = [name for name in folders if not _is_added(name)]
        for link in filter(os.path.islink, (os.path.join(parent, name) for name in folders)):
            if os.path.commonpath([above, target := os.path.realpath(link)]) == target:
                raise ValueError(f"{printable(f'{link} is a link to {target}, a folder above it')}; remove the link")
        start, images = os.path.join(parent, ""), [name for name in files if is_image(name)]
        found += [start + name for name in images]
        others = (name for name in sorted({*files}.difference(images)) if not _is_added(name))
        left_out.update(os.path.splitext(name)[1].lower() or "without extension" for name in others)
    return sorted(found, key=lambda path: path.replace(os.sep, "/")), left_out


def describe_left_out(found: int, left_out: Counter[str]) -> str:
    """One line on the files that `list_images` left out."""
    kinds = shorten([f"{count} {kind}" for kind, count in left_out.most_common()])
    return f"{left_out.total()} of {found + left_out.total()} files are left out: {kinds}"


def shorten(names: Sequence[str]) -> str:
    """The first five names, as they can be printed."""
    return printable(", ".join(names[:5])) + ", ..." * (len(names) > 5)


def _is_added(name: str) -> bool:
    return name.startswith(".") or name.lower() in ADDED


def _refuse_splits(root: Path, folders: Iterable[str]) -> None:
    lower = {name.lower() for name in folders}
    if lower and lower <= TRAIN | HELD_OUT or (lower & TRAIN and lower & HELD_OUT):
        names = printable(", ".join(folders))
        raise ValueError(f"{root}: its folders are splits ({names}), not classes; give one of them")


def _folders(root: Path) -> list[str]:
    return [path.name for path in root.iterdir() if path.is_dir() and not _is_added(path.name)]
