"""Image folders (`root/class/image.jpg`), and image files as 8-bit RGB.

The writer of `.beton` files and the folder loader both use it, so that they have the same samples in the same order.
"""

import copy
import errno
import hashlib
import os
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError, features

# By content; the extension does not count.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "PPM", "TIFF", "GIF", *(["AVIF"] if features.check("avif") else []))
EXTENSIONS = tuple(
    ".jpg .jpeg .jpe .jfif .mpo .png .apng .webp .bmp .ppm .pgm .pbm .pnm .tif .tiff .gif".split()
    + [".avif"] * ("AVIF" in FORMATS)
)
# Extensions of images that are not read.
OTHER_IMAGES = {*".heic .heif .avif .jxl .jp2 .svg .psd .tga .ico .exr .dng .cr2 .cr3 .nef .arw .raf .rw2 .orf".split()}
OTHER_IMAGES -= {*EXTENSIONS}
# Folders and files that systems and archivers add, beside hidden ones.
ADDED = {"@eadir", "__macosx", "#recycle", "$recycle.bin", "lost+found", "system volume information"}
ADDED |= {"thumbs.db", "desktop.ini"}
MAX_PIXELS = 89_478_485  # above, PIL warns of an image that is small as a file and fills the memory
MIN_SIDE = 2  # pixels; a centre crop of half of one pixel is empty, and FFCV aborts the process on an empty crop
TURNS = "FLIP_LEFT_RIGHT ROTATE_180 FLIP_TOP_BOTTOM TRANSPOSE ROTATE_270 TRANSVERSE ROTATE_90".split()
ORIENTATIONS = {number: Image.Transpose[name] for number, name in enumerate(TURNS, 2)}  # of EXIF
PHOTOMETRIC, WHITE_IS_ZERO = 262, 0  # a tag of TIFF and its value
PNG_SCALE = {"L;2": 85, "L;4": 17, "RGB;16B": 1 / 256}  # of PIL's raw modes that become 8 bits
TRAIN, HELD_OUT = {"train", "training"}, {"val", "valid", "validation", "test", "testing", "dev", "eval", "holdout"}
# Errors of the machine, not of a file.
IO_ERRORS = {getattr(errno, name, -1) for name in ("EIO", "EMFILE", "ENFILE", "ENOMEM", "ESTALE", "EREMOTEIO")}


class UnreadableImage(ValueError):
    """An image that cannot be decoded, or is too small; the message names it."""


def printable(name: str) -> str:
    """Escapes control characters, which a terminal obeys, and bytes that are not UTF-8, as repr does."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


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
        digests: (N, 16) uint8 of the content of each file; None: `image_check.check_images` has not read them.
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
        folders = {os.fsencode(name).decode("utf-8", "surrogateescape"): root / name for name in _folders(root)}
        folders = dict(sorted(folders.items()))
        if not folders:
            without = (
                "; images without classes are for vilonghorn pretrain" if any(map(is_image, os.listdir(root))) else ""
            )
            raise ValueError(f"{root}: no class folders in it; expected {root}/CLASS/IMAGE for each class{without}")
        _refuse_splits(root, folders)
        check_distinct(str(root), [*folders])
        seen: dict[tuple[int, int], str] = {}
        found, left_out = zip(*(list_images(folder, seen) for folder in folders.values()))
        empty = [name for name, files in zip(folders, found) if not files]
        if empty and (classes is None or len(empty) == len(folders)):
            raise ValueError(
                f"{root}: no image in class folder {shorten(empty)}; add images ({' '.join(EXTENSIONS)}) "
                "or remove the folder"
            )
        self.classes = list(folders if classes is None else classes)
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
        one = f"has one class only, {printable(folders[0].name)}" if self.num_classes == 1 else ""
        direct = {str(folder) for folder in folders}
        if not any(os.path.dirname(path) in direct for path in self.paths):
            inner = printable(str(folders[0]))
            level = f"give {inner} if the classes are in it" if len(folders) == 1 else "expected images in them"
            one = " and ".join(filter(None, [one, f"its class folders have folders only; {level}"]))
        if one:
            self.notes.append(f"{self.path}: {one}")

    @property
    def num_classes(self) -> int:
        """Number of class names."""
        return len(self.classes)

    @property
    def names(self) -> list[str]:
        """The image files, relative to the folder."""
        start = len(self.paths[0]) - len(os.path.relpath(self.paths[0], self.path))
        return [path[start:] for path in self.paths]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the names of the files."""
        return hashlib.sha256("\n".join(self.names).encode(errors="surrogateescape")).hexdigest()

    @property
    def content(self) -> str | None:
        """SHA-256 of the images, in order; None: `image_check.check_images` has not read them."""
        return None if self.digests is None else hashlib.sha256(self.digests.tobytes()).hexdigest()

    def select(self, chosen: np.ndarray) -> "ImageFolder":
        """The images at these positions, or where `chosen` (N,) is True, with all class names and without notes."""
        subset = copy.copy(self)
        subset.__dict__.pop("digest", None)
        positions = np.arange(len(self.paths))[chosen]
        subset.paths, subset.labels, subset.notes = [self.paths[i] for i in positions], self.labels[positions], []
        subset.digests = None if self.digests is None else self.digests[positions]
        return subset

    def split(self, fraction: float, seed: int = 0) -> tuple["ImageFolder", "ImageFolder"]:
        """Splits the images of each class at random: all but `fraction`, and that fraction, at least one of each class.

        The images have `digests`, which decide with the seed, so that other names give the same split. Equal images are
        in the same part. A class of one image has it in the first part.
        """
        key = hashlib.sha256(str(seed).encode()).digest()
        order = [hashlib.sha256(key + digest.tobytes()).digest() for digest in self.digests]
        held_out: set[bytes] = set()
        for label in np.unique(self.labels):
            own = sorted({order[i] for i in np.flatnonzero(self.labels == label)})
            held_out.update(own[: min(max(1, round(fraction * len(own))), len(own) - 1)])
        chosen = np.array([value in held_out for value in order])
        return self.select(~chosen), self.select(chosen)

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
        parts = (Path(path).relative_to(self.path).parts for path in self.paths)
        self.classes = sorted({names[0] for names in parts if len(names) > 1})
        self.labels = np.zeros(len(self.paths), np.int64)


def match_classes(source: str, names: Sequence[str], classes: Sequence[str]) -> np.ndarray:
    """(len(names),) int64: the index of each name in `classes`. Equivalent Unicode forms (NFC) are the same name.

    Raises:
        ValueError: a name of `source` is not among them.
    """
    labels = {unicodedata.normalize("NFC", name): label for label, name in enumerate(classes)}
    found = [labels.get(unicodedata.normalize("NFC", name), -1) for name in names]
    if unknown := [name for name, label in zip(names, found) if label < 0]:
        similar = {_appearance(name): name for name in classes}
        looks = [
            f"{name!a} looks like {similar[_appearance(name)]!a}" for name in unknown if _appearance(name) in similar
        ]
        raise ValueError(
            f"{source}: there is no class {shorten(unknown)} in the training data or the model, which have "
            f"{shorten(classes)}; remove or rename it{f' ({shorten(looks)})' * bool(looks)}"
        )
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


def list_images(
    folder: str | os.PathLike, seen: dict[tuple[int, int], str] | None = None
) -> tuple[list[str], Counter[str]]:
    """Finds image files in a folder at any depth, by their extension. Links are followed.

    Hidden files and folders, and those that systems and archivers add, such as `@eaDir` and `__MACOSX`, do not count.

    Args:
        folder: where to look.
        seen: device and inode of the folders that earlier calls have read, and the folder that was given to them; those
            that are read are added.

    Returns:
        The files, sorted as strings; and by extension the number of files that are left out.

    Raises:
        ValueError: a link leads to a folder above `folder`, or to one that an earlier call has read.
        OSError: a folder cannot be read.
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


def read_image(path: str | os.PathLike, max_pixels: int = MAX_PIXELS, file: IO[bytes] | None = None) -> Image.Image:
    """Reads an image file of one of `FORMATS` as upright 8-bit RGB; see `to_rgb`.

    Args:
        path: the file; its extension does not count.
        max_pixels: width times height above which the image is refused. A number above `PIL.Image.MAX_IMAGE_PIXELS`
            raises that limit, too, for this process.
        file: read in place of `path`, which names it in errors.

    Raises:
        UnreadableImage (a ValueError): it is not there, is not a regular file, cannot be decoded to the end, a side is
            below 2 pixels, or it has more than `max_pixels`.
        OSError: the disk or the memory fails.
    """
    name = printable(os.fspath(path))
    if file is None and not os.path.isfile(path):  # opening a named pipe would wait for ever
        what = "it is not a regular file" if os.path.exists(path) else "there is no such file"
        raise UnreadableImage(f"{name}: {what}")
    if Image.MAX_IMAGE_PIXELS is not None:
        Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS, max_pixels)
    try:
        # Without `formats`, PIL runs Ghostscript on an EPS file.
        with Image.open(file or path, formats=FORMATS) as image:
            width, height = image.size
            if width * height > max_pixels:
                raise Image.DecompressionBombError(f"{width}x{height} are more than the limit of {max_pixels:,}")
            if min(image.size) < MIN_SIDE:
                raise ValueError(f"{width}x{height} pixels; each side must have at least {MIN_SIDE}")
            return to_rgb(image)
    except Image.DecompressionBombError as error:  # also PIL's own, above twice MAX_IMAGE_PIXELS
        remedy = "shrink it or, if you trust the file, raise max_pixels (--max-pixels, --data.max_pixels)"
        raise UnreadableImage(f"{name}: too many pixels ({error}); {remedy}") from error
    except MemoryError as error:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), name) from error
    except Exception as error:  # decoders raise nearly any exception on a damaged file
        if getattr(error, "errno", None) in IO_ERRORS:
            raise OSError(error.errno, error.strerror, name) from error
        unknown = isinstance(error, UnidentifiedImageError)
        reason = f"its content is none of {', '.join(FORMATS)}" if unknown else error
        raise UnreadableImage(f"{name}: not a readable image ({reason}); convert, repair or remove it") from error


def image_sizes(paths: Sequence[str], most: int = 64) -> np.ndarray:
    """(n, 2) int64: the sides of up to `most` evenly spaced images, without those that cannot be read."""
    sizes = []
    for path in filter(os.path.isfile, paths[:: max(1, -(-len(paths) // most))]):
        with suppress(Exception), Image.open(path, formats=FORMATS) as image:  # `read_image` says what is wrong
            sizes.append(image.size)
    return np.array(sizes, np.int64).reshape(-1, 2)


def describe_crop(sizes: np.ndarray, crop_pct: float, crop_mode: str) -> str | None:
    """One line on what timm's evaluation transform shows of images with sides (n, 2); None if it is 90% or more."""
    if not len(sizes):
        return None
    aspect = sizes.max(1) / sizes.min(1)
    shown = {
        "center": crop_pct**2 / aspect,
        "squash": np.full(len(sizes), crop_pct**2),
        "border": crop_pct * np.minimum(1, crop_pct * aspect),
    }[crop_mode]
    percent = 100 * float(np.median(shown))
    whole = "crop_mode squash or border with crop_pct 1 shows all of it"
    return None if percent >= 90 else f"the {crop_mode} crop shows {percent:.0f}% of an image (median); {whole}"


def to_rgb(image: Image.Image) -> Image.Image:
    """Converts an image to RGB: applies its EXIF orientation, scales 16-bit gray, puts transparent pixels on white.

    Raises:
        ValueError: the range of its pixels is unknown: they have 32 bits, or 16 bits of which the highest four are 0.
    """
    if image.mode == "F" or (image.mode == "I" and image.format not in ("PNG", "PPM")):  # those have 16 bits
        kind = "floating point numbers" if image.mode == "F" else "integers"
        raise ValueError(f"its pixels are 32-bit {kind}, of unknown range; convert it to 8 bits")
    if image.mode.startswith("I") and getattr(image, "tag_v2", {}).get(PHOTOMETRIC) == WHITE_IS_ZERO:
        raise ValueError("its 16-bit pixels are white where they are 0, which PIL ignores; convert it to 8 bits")
    tile = getattr(image, "tile", None)
    raw = tile[0].args if tile else None  # PIL's name of the stored mode, or a tuple that begins with it
    raw = raw[0] if isinstance(raw, tuple) and raw else raw
    image.load()  # PIL turns a TIFF when it reads the pixels
    if raw in PNG_SCALE and "transparency" in image.info:  # PIL scales the pixels to 8 bits, but not this colour
        color = (np.array(image.info["transparency"]) * PNG_SCALE[raw]).astype(int)
        image.info["transparency"] = tuple(color.tolist()) if color.ndim else int(color)
    turn = ORIENTATIONS.get(_as_number(image.getexif().get(ExifTags.Base.Orientation)))  # PIL fails on damaged EXIF
    image = image.copy() if turn is None else image.transpose(turn)
    is_gray = image.mode.startswith("I")
    if is_gray or "16" in str(raw):
        highest = np.atleast_3d(np.asarray(image))[..., : 1 if "A" in image.mode[:2] else 3].max()
        if 0 < highest < (1 << 12 if is_gray else 1 << 4):  # PIL has reduced colours to 8 bits
            raise ValueError("its pixels have 16 bits, of which the highest four are 0; scale or convert it to 8 bits")
    if is_gray:  # 16 bits, which PIL would clip to 255 instead of scaling
        pixels = np.asarray(image, dtype=np.int64)
        pixels = np.where(pixels == image.info.get("transparency", -1), 0xFFFF, pixels)
        image = Image.fromarray(np.clip(pixels >> 8, 0, 255).astype(np.uint8))
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    image = image if image.mode == "RGB" else image.convert("RGB")
    image.info.clear()  # else the orientation would be applied again
    return image


def _as_number(value: Any) -> Any:
    """The number in a tag of EXIF that has the type BYTE, UNDEFINED or ASCII; others are numbers already."""
    if isinstance(value, bytes) and len(value) == 1:
        return value[0]
    return int(value) if isinstance(value, str) and value.strip("\0 ").isdecimal() else value
