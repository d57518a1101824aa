"""Image folders (`root/class/image.jpg`), and image files as 8-bit RGB.

The writer of `.beton` files and the folder loader both use it, so that they have the same samples in the same order.
"""

import errno
import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import IO

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
        # The same names and order in every locale and on every system.
        folders = {os.fsencode(name).decode("utf-8", "surrogateescape"): root / name for name in _folders(root)}
        folders = dict(sorted(folders.items()))
        if not folders:
            without = (
                "; images without classes are for vilonghorn pretrain" if any(map(is_image, os.listdir(root))) else ""
            )
            raise ValueError(f"{root}: no class folders in it; expected {root}/CLASS/IMAGE for each class{without}")
        _refuse_splits(root, folders)
        found, left_out = zip(*(list_images(folder) for folder in folders.values()))
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
        beside = [name for name in os.listdir(self.path) if (self.path / name).is_file() and is_image(name)]
        left_out.update(f"{os.path.splitext(name)[1].lower()} beside the class folders" for name in beside)
        if left_out:
            self.notes.append(f"{self.path}: {describe_left_out(len(self.paths), left_out)}")
        linked = Counter(map(os.path.realpath, folders))
        if same := [folder.name for folder in folders if linked[os.path.realpath(folder)] > 1]:
            self.notes.append(f"{self.path}: class folders {shorten(same)} are links to the same images")
        if self.num_classes == 1:
            self.notes.append(f"{self.path}: it has one class only, {printable(folders[0].name)}")
        if not {os.path.dirname(path) for path in self.paths} & {str(folder) for folder in folders}:
            inner = printable(str(folders[0]))
            level = f"give {inner} if the classes are in it" if len(folders) == 1 else "expected images in them"
            self.notes.append(f"{self.path}: its class folders have folders only; {level}")

    @property
    def num_classes(self) -> int:
        """Number of class names."""
        return len(self.classes)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the names of the files."""
        names = "\n".join(os.path.relpath(path, self.path) for path in self.paths)
        return hashlib.sha256(names.encode(errors="surrogateescape")).hexdigest()

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return read_image(self.paths[index], self.max_pixels), int(self.labels[index])


class UnlabelledFolder(ImageFolder):
    """An `ImageFolder` of the images at any depth of a folder, or in it, whose labels are 0.

    `classes` are the folders in it that have images, for a message; the argument is not used.
    """

    def __init__(self, root: str | os.PathLike, max_pixels: int = MAX_PIXELS, classes: Sequence[str] | None = None):
        self.path, self.max_pixels, self.notes = Path(root), max_pixels, []
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
    """(len(names),) int64: the index of each name in `classes`.

    Raises:
        ValueError: a name of `source` is not among them.
    """
    labels = {name: label for label, name in enumerate(classes)}
    if unknown := [name for name in names if name not in labels]:
        raise ValueError(
            f"{source}: there is no class {shorten(unknown)} in the training data or the model, which have "
            f"{shorten(classes)}; remove or rename it"
        )
    return np.array([labels[name] for name in names], np.int64)


def is_image(name: str) -> bool:
    """Whether a file with this name is taken for an image."""
    return name.lower().endswith(EXTENSIONS) and not _is_added(name)


def list_images(folder: str | os.PathLike) -> tuple[list[str], Counter[str]]:
    """Finds image files in a folder at any depth, by their extension. Links are followed.

    Hidden files and folders, and those that systems and archivers add, such as `@eaDir` and `__MACOSX`, do not count.
    Returns the files, sorted as strings; and by extension the number of files that are left out. A folder that cannot
    be read is an OSError.
    """

    def fail(error: OSError) -> None:
        raise error  # os.walk would leave the folder out

    found: list[str] = []
    left_out: Counter[str] = Counter()
    seen = set()
    for parent, folders, files in os.walk(folder, onerror=fail, followlinks=True):
        status = os.stat(parent)
        if status.st_ino and (status.st_dev, status.st_ino) in seen:  # a link to a folder above it
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = [name for name in folders if not _is_added(name)]
        found += [os.path.join(parent, name) for name in files if is_image(name)]
        others = [name for name in files if not is_image(name) and not _is_added(name)]
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
        ValueError: its pixels have 32 bits, of which the range is unknown.
    """
    if image.mode == "F" or (image.mode == "I" and image.format not in ("PNG", "PPM")):  # those have 16 bits
        kind = "floating point numbers" if image.mode == "F" else "integers"
        raise ValueError(f"its pixels are 32-bit {kind}, of unknown range; convert it to 8 bits")
    raw = image.tile[0].args if image.format == "PNG" and getattr(image, "tile", None) else None
    image.load()  # PIL turns a TIFF when it reads the pixels
    if raw in PNG_SCALE and "transparency" in image.info:  # PIL scales the pixels to 8 bits, but not this colour
        color = (np.array(image.info["transparency"]) * PNG_SCALE[raw]).astype(int)
        image.info["transparency"] = tuple(color.tolist()) if color.ndim else int(color)
    turn = ORIENTATIONS.get(image.getexif().get(ExifTags.Base.Orientation))  # PIL's own function fails on damaged EXIF
    image = image.copy() if turn is None else image.transpose(turn)
    if image.mode.startswith("I"):  # 16-bit gray, which PIL would clip to 255 instead of scaling
        pixels = np.asarray(image, dtype=np.int64)
        pixels = np.where(pixels == image.info.get("transparency", -1), 0xFFFF, pixels)
        image = Image.fromarray(np.clip(pixels >> 8, 0, 255).astype(np.uint8))
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    image = image if image.mode == "RGB" else image.convert("RGB")
    image.info.clear()  # else the orientation would be applied again
    return image
