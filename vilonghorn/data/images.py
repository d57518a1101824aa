"""Image folders (`root/class/image.jpg`), and image files as 8-bit RGB.

The writer of `.beton` files and the folder loader both use it, so that they have the same samples in the same order.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm", ".tif", ".tiff")
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "PPM", "TIFF", "GIF")  # by content; the extension does not count
MAX_PIXELS = 89_478_485  # above, PIL warns of an image that is small as a file and fills the memory
MIN_SIDE = 2  # pixels; a centre crop of half of one pixel is empty, and FFCV aborts the process on an empty crop
ORIENTATION = 0x0112  # the EXIF tag; 1 is upright
_SPLITS = {"train", "training", "val", "valid", "validation", "test"}


class UnreadableImage(ValueError):
    """An image that cannot be decoded, or is too small; the message names it."""


def printable(name: str) -> str:
    """Escapes control characters, which a terminal obeys, and bytes that are not UTF-8, as repr does."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


def is_utf8(name: str) -> bool:
    """Whether a name can be written as UTF-8. Python keeps other bytes of a file name as lone surrogates."""
    return not any("\ud800" <= c <= "\udfff" for c in name)


class ImageFiles:
    """A map-style dataset of (RGB image, label) over image files. An image is opened when it is indexed.

    Attributes:
        root: the folder of the files.
        classes: class names by label.
        paths: image files.
        labels: (N,) int64.
        max_pixels: larger images are refused when they are opened.
    """

    def __init__(
        self, root: Path, classes: list[str], paths: list[str], labels: np.ndarray, max_pixels: int = MAX_PIXELS
    ):
        self.root, self.classes, self.paths, self.labels = root, classes, paths, labels
        self.max_pixels = max_pixels

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return read_image(self.paths[index], self.max_pixels), int(self.labels[index])


class ImageFolder(ImageFiles):
    """The image files of `root/class/**/image`, both levels in sorted order.

    Hidden files and folders and files without the extension of an image are skipped. Links to folders are followed, but
    not to a folder above, and each folder is read once for a class.

    Args:
        root: a folder with one folder of images for each class.
        max_pixels: width times height above which an image is refused when it is opened.

    Raises:
        FileNotFoundError, NotADirectoryError: there is no such folder.
        ValueError: it has no class folders, has the splits of a dataset, or one of its classes has no image or a name
            that is not UTF-8.
    """

    def __init__(self, root: str | os.PathLike, max_pixels: int = MAX_PIXELS):
        root = Path(root)
        if not root.is_dir():
            kind, what = (NotADirectoryError, "not a") if root.exists() else (FileNotFoundError, "no such")
            raise kind(f"{root}: {what} folder; expected one with a folder of images for each class")
        real = Path(os.path.realpath(root))
        above = {str(real), *map(str, real.parents)}
        inside = (p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
        folders = sorted(p for p in inside if os.path.realpath(p) not in above)
        classes = [folder.name for folder in folders]
        if not folders:
            raise ValueError(f"{root}: no class folders in it; expected {root}/CLASS/IMAGE for each class")
        if (odd := next((name for name in classes if not is_utf8(name)), None)) is not None:
            raise ValueError(f"{root}: the name of class folder '{printable(odd)}' is not UTF-8; rename the folder")
        if _SPLITS.issuperset(name.lower() for name in classes):
            raise ValueError(f"{root}: its folders are splits ({', '.join(classes)}), not classes; give one of them")
        files = [sorted(images_under(folder, set(above))) for folder in folders]
        empty = [name for name, found in zip(classes, files) if not found]
        if empty:
            raise ValueError(
                f"{root}: no image in class folder {printable(', '.join(empty[:5]))}{', ...' * (len(empty) > 5)}; "
                f"add images ({' '.join(EXTENSIONS)}) or remove the folder"
            )
        labels = np.repeat(np.arange(len(files), dtype=np.int64), [len(found) for found in files])
        super().__init__(root, classes, [path for found in files for path in found], labels, max_pixels)


def images_under(folder: str | os.PathLike, visited: set[str] | None = None) -> Iterator[str]:
    """Image files in a folder at any depth, without hidden files and folders.

    `visited` are the real paths of folders to skip; those read are added.
    """

    def fail(error: OSError) -> None:
        raise error  # os.walk would leave out a folder that it cannot read

    visited = set() if visited is None else visited
    for parent, folders, files in os.walk(folder, onerror=fail, followlinks=True):
        if (real := os.path.realpath(parent)) in visited:
            folders.clear()
            continue
        visited.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))  # the first of two links counts
        for name in files:
            if name.lower().endswith(EXTENSIONS) and not name.startswith("."):
                yield os.path.join(parent, name)


@contextmanager
def open_image(path: str, max_pixels: int = MAX_PIXELS) -> Iterator[Image.Image]:
    """Opens an image file of one of `FORMATS`. PIL would run Ghostscript on an EPS file, whatever its extension.

    Args:
        path: the file; its extension does not count.
        max_pixels: width times height above which the image is refused. A number above `PIL.Image.MAX_IMAGE_PIXELS`
            raises that limit, too, for this process.

    Raises:
        UnreadableImage: it is not there, not an image, too small or too large, or anything fails inside the block.
    """
    name = printable(path)
    if not os.path.lexists(path):
        raise UnreadableImage(f"{name}: there is no such file")
    remedy = "shrink it or, if you trust the file, raise max_pixels (--max-pixels, --data.max_pixels)"
    if Image.MAX_IMAGE_PIXELS is not None:
        Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS, max_pixels)
    try:
        if not os.path.isfile(path):  # opening a named pipe would wait for ever
            raise ValueError("not a file")
        with Image.open(path, formats=FORMATS) as image:
            width, height = image.size
            if min(image.size) < MIN_SIDE:
                raise ValueError(f"{width}x{height} pixels; each side must have at least {MIN_SIDE}")
            if width * height > max_pixels:
                limit = f"more than the limit of {max_pixels:,} pixels"
                raise UnreadableImage(f"{name}: {width}x{height} pixels are {limit}; {remedy}")
            yield image
    except UnreadableImage:
        raise
    except Image.DecompressionBombError as error:  # PIL's own check, of twice MAX_IMAGE_PIXELS
        raise UnreadableImage(f"{name}: too many pixels ({error}); {remedy}") from error
    except Exception as error:  # decoders raise nearly any exception on a damaged file
        unknown = isinstance(error, UnidentifiedImageError)
        reason = f"its content is none of {', '.join(FORMATS)}" if unknown else error
        raise UnreadableImage(f"{name}: not a readable image ({reason}); convert, repair or remove it") from error


def read_header(path: str, max_pixels: int = MAX_PIXELS) -> tuple[int, int, list[str]]:
    """Reads width and height of an image file in pixels, and what `to_rgb` changes.

    The latter are PIL's mode if it is not RGB, "transparent pixels" and "turned by EXIF".
    """
    with open_image(path, max_pixels) as image:
        kinds = {
            image.mode: image.mode != "RGB",
            "transparent pixels": image.has_transparency_data,
            "turned by EXIF": _turned(image),
        }
        return *image.size, [kind for kind, found in kinds.items() if found]


def read_image(path: str, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Reads an image file as upright 8-bit RGB; see `to_rgb`.

    Raises:
        UnreadableImage: it is not there, cannot be decoded to the end, a side is below 2 pixels, or it has more than
            `max_pixels`.
    """
    with open_image(path, max_pixels) as image:
        image.load()
        return to_rgb(image)


def to_rgb(image: Image.Image) -> Image.Image:
    """Converts an image to RGB: applies its EXIF orientation, scales 16-bit gray, puts transparent pixels on white.

    Raises:
        ValueError: its pixels have 32 bits, of which the range is unknown.
    """
    if image.mode == "F" or (image.mode == "I" and image.format not in ("PNG", "PPM")):  # those have 16 bits
        kind = "floating point numbers" if image.mode == "F" else "integers"
        raise ValueError(f"its pixels are 32-bit {kind}, of unknown range; convert it to 8 bits")
    if _turned(image):
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):  # 16-bit gray, which PIL would clip to 255 instead of scaling
        pixels = np.asarray(image, dtype=np.int64)
        pixels = np.where(pixels == image.info.get("transparency", -1), 0xFFFF, pixels)
        image = Image.fromarray(np.clip(pixels >> 8, 0, 255).astype(np.uint8))
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return image if image.mode == "RGB" else image.convert("RGB")


def _turned(image: Image.Image) -> bool:
    return image.getexif().get(ORIENTATION, 1) != 1
