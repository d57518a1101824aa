"""Image folders (`root/class/image.jpg`), and image files as 8-bit RGB.

The writer of `.beton` files and the folder loader both use it, so that they have the same samples in the same order.
"""

import hashlib
import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm", ".tif", ".tiff")
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "PPM", "TIFF", "GIF")  # by content; the extension does not count
MAX_PIXELS = 89_478_485  # above, PIL warns of an image that is small as a file and fills the memory
MIN_SIDE = 2  # pixels; a centre crop of half of one pixel is empty, and FFCV aborts the process on an empty crop
_SPLITS = {"train", "training", "val", "valid", "validation", "test"}


class UnreadableImage(ValueError):
    """An image that cannot be decoded, or is too small; the message names it."""


def printable(name: str) -> str:
    """Escapes control characters, which a terminal obeys, and bytes that are not UTF-8, as repr does."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


class ImageFolder:
    """A map-style dataset of (RGB image, label) over `root/class/**/image`, both levels in sorted order.

    An image is opened when it is indexed. See `images_under` for the files that are taken.

    Args:
        root: a folder with one folder of images for each class.
        max_pixels: width times height above which an image is refused when it is opened.

    Attributes:
        classes: class names by label.
        paths: image files.
        labels: (N,) int64.

    Raises:
        FileNotFoundError, NotADirectoryError: there is no such folder.
        ValueError: it has no class folders, has the splits of a dataset, or one of its classes has no image.
    """

    def __init__(self, root: str | os.PathLike, max_pixels: int = MAX_PIXELS):
        root = Path(root)
        if not root.is_dir():
            kind, what = (NotADirectoryError, "not a") if root.exists() else (FileNotFoundError, "no such")
            raise kind(f"{root}: {what} folder; expected one with a folder of images for each class")
        folders = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
        classes = [folder.name for folder in folders]
        self.path, self.classes, self.max_pixels = root, classes, max_pixels
        if not folders:
            raise ValueError(f"{root}: no class folders in it; expected {root}/CLASS/IMAGE for each class")
        if _SPLITS.issuperset(name.lower() for name in classes):
            raise ValueError(f"{root}: its folders are splits ({', '.join(classes)}), not classes; give one of them")
        files = [sorted(images_under(folder)) for folder in folders]
        if empty := [name for name, found in zip(classes, files) if not found]:
            raise ValueError(
                f"{root}: no image in class folder {printable(', '.join(empty[:5]))}{', ...' * (len(empty) > 5)}; "
                f"add images ({' '.join(EXTENSIONS)}) or remove the folder"
            )
        self.paths = [path for found in files for path in found]
        self.labels = np.repeat(np.arange(len(files), dtype=np.int64), [len(found) for found in files])

    @property
    def num_classes(self) -> int:
        """Number of class folders."""
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


def images_under(folder: str | os.PathLike) -> Iterator[str]:
    """Image files in a folder at any depth, by their extension, without hidden files and folders; links are followed.

    Raises the OSError of a folder that cannot be read.
    """

    def fail(error: OSError) -> None:
        raise error  # os.walk would leave the folder out

    for parent, folders, files in os.walk(folder, onerror=fail, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            if name.lower().endswith(EXTENSIONS) and not name.startswith("."):
                yield os.path.join(parent, name)


def read_image(path: str, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Reads an image file of one of `FORMATS` as upright 8-bit RGB; see `to_rgb`.

    Args:
        path: the file; its extension does not count.
        max_pixels: width times height above which the image is refused. A number above `PIL.Image.MAX_IMAGE_PIXELS`
            raises that limit, too, for this process.

    Raises:
        UnreadableImage: it is not there, cannot be decoded to the end, a side is below 2 pixels, or it has more than
            `max_pixels`.
    """
    name = printable(path)
    if not os.path.isfile(path):  # opening a named pipe would wait for ever
        raise UnreadableImage(f"{name}: there is no such file")
    if Image.MAX_IMAGE_PIXELS is not None:
        Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS, max_pixels)
    try:
        with Image.open(path, formats=FORMATS) as image:  # without `formats`, PIL runs Ghostscript on an EPS file
            width, height = image.size
            if width * height > max_pixels:
                raise Image.DecompressionBombError(f"{width}x{height} are more than the limit of {max_pixels:,}")
            if min(image.size) < MIN_SIDE:
                raise ValueError(f"{width}x{height} pixels; each side must have at least {MIN_SIDE}")
            image.load()
            return to_rgb(image)
    except Image.DecompressionBombError as error:  # also PIL's own, above twice MAX_IMAGE_PIXELS
        remedy = "shrink it or, if you trust the file, raise max_pixels (--max-pixels, --data.max_pixels)"
        raise UnreadableImage(f"{name}: too many pixels ({error}); {remedy}") from error
    except Exception as error:  # decoders raise nearly any exception on a damaged file
        unknown = isinstance(error, UnidentifiedImageError)
        reason = f"its content is none of {', '.join(FORMATS)}" if unknown else error
        raise UnreadableImage(f"{name}: not a readable image ({reason}); convert, repair or remove it") from error


def to_rgb(image: Image.Image) -> Image.Image:
    """Converts an image to RGB: applies its EXIF orientation, scales 16-bit gray, puts transparent pixels on white.

    Raises:
        ValueError: its pixels have 32 bits, of which the range is unknown.
    """
    if image.mode == "F" or (image.mode == "I" and image.format not in ("PNG", "PPM")):  # those have 16 bits
        kind = "floating point numbers" if image.mode == "F" else "integers"
        raise ValueError(f"its pixels are 32-bit {kind}, of unknown range; convert it to 8 bits")
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):  # 16-bit gray, which PIL would clip to 255 instead of scaling
        pixels = np.asarray(image, dtype=np.int64)
        pixels = np.where(pixels == image.info.get("transparency", -1), 0xFFFF, pixels)
        image = Image.fromarray(np.clip(pixels >> 8, 0, 255).astype(np.uint8))
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return image if image.mode == "RGB" else image.convert("RGB")
