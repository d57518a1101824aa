"""Image folders (`root/class/image.jpg`), and image files as 8-bit RGB.

The writer of `.beton` files and the folder loader both use it, so that they have the same samples in the same order.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm", ".tif", ".tiff")
MIN_SIDE = 2  # pixels; a centre crop of half of one pixel is empty, and FFCV aborts the process on an empty crop
ORIENTATION = 0x0112  # the EXIF tag; 1 is upright
_SPLITS = {"train", "training", "val", "valid", "validation", "test"}


class UnreadableImage(ValueError):
    """An image that cannot be decoded, or is too small; the message names it."""


class ImageFiles:
    """A map-style dataset of (RGB image, label) over image files. An image is opened when it is indexed.

    Attributes:
        root: the folder of the files.
        classes: class names by label.
        paths: image files.
        labels: (N,) int64.
    """

    def __init__(self, root: Path, classes: list[str], paths: list[str], labels: np.ndarray):
        self.root, self.classes, self.paths, self.labels = root, classes, paths, labels

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return read_image(self.paths[index]), int(self.labels[index])


class ImageFolder(ImageFiles):
    """The image files of `root/class/**/image`, both levels in sorted order.

    Skipped are hidden files, hidden class folders, files without the extension of an image, and what is neither a
    regular file nor a link to one. Links to folders are followed, but not to a folder above, and each folder is read
    once for a class.

    Args:
        root: a folder with one folder of images for each class.

    Raises:
        FileNotFoundError, NotADirectoryError: there is no such folder.
        ValueError: it has no class folders, holds the splits of a dataset, or one of its classes has no image.
    """

    def __init__(self, root: str | os.PathLike):
        root = Path(root)
        if not root.exists():
            raise FileNotFoundError(f"{root}: no such folder; expected one with a folder of images for each class")
        if not root.is_dir():
            raise NotADirectoryError(f"{root}: not a folder; expected one with a folder of images for each class")
        real = Path(os.path.realpath(root))
        above = {str(real), *map(str, real.parents)}
        inside = (p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
        folders = sorted(p for p in inside if os.path.realpath(p) not in above)
        classes = [folder.name for folder in folders]
        if not folders:
            raise ValueError(f"{root}: no class folders in it; expected {root}/CLASS/IMAGE for each class")
        if _SPLITS.issuperset(name.lower() for name in classes):
            raise ValueError(f"{root}: holds splits ({', '.join(classes)}), not classes; give one of them")
        files = [sorted(_images_under(folder, set(above))) for folder in folders]
        empty = [name for name, found in zip(classes, files) if not found]
        if empty:
            raise ValueError(
                f"{root}: no image in class folder {', '.join(empty[:5])}{', ...' * (len(empty) > 5)}; "
                f"add images ({' '.join(EXTENSIONS)}) or remove the folder"
            )
        labels = np.repeat(np.arange(len(files), dtype=np.int64), [len(found) for found in files])
        super().__init__(root, classes, [path for found in files for path in found], labels)


def _images_under(folder: str | os.PathLike, visited: set[str]) -> Iterator[str]:
    """Image files by depth. `visited` holds the real paths of folders to skip; those read are added."""
    real = os.path.realpath(folder)
    if real in visited:
        return
    visited.add(real)
    with os.scandir(folder) as scan:
        entries = sorted(scan, key=lambda entry: entry.name)  # decides which of two links to one folder counts
    for entry in entries:
        if entry.is_dir():
            yield from _images_under(entry.path, visited)
        elif entry.name.lower().endswith(EXTENSIONS) and not entry.name.startswith("."):
            # A dangling link is kept, so that reading it names it.
            if entry.is_file() or not os.path.exists(entry.path):
                yield entry.path


@contextmanager
def _opened(path: str) -> Iterator[Image.Image]:
    """Opens an image file. Whatever fails, inside the block too, is raised as UnreadableImage."""
    if not os.path.lexists(path):
        raise UnreadableImage(f"{path}: there is no such file")
    try:
        with Image.open(path) as image:
            if min(image.size) < MIN_SIDE:
                width, height = image.size
                raise ValueError(f"{width}x{height} pixels; each side must have at least {MIN_SIDE}")
            yield image
    except Exception as error:  # decoders raise nearly any exception on a damaged file
        raise UnreadableImage(f"{path}: not a readable image ({error}); repair or remove it") from error


def read_header(path: str) -> tuple[int, int, list[str]]:
    """Reads width and height of an image file in pixels, and what `to_rgb` changes: PIL's mode, "turned by EXIF"."""
    with _opened(path) as image:
        turned = image.getexif().get(ORIENTATION, 1) != 1
        return *image.size, [image.mode] * (image.mode != "RGB") + ["turned by EXIF"] * turned


def read_image(path: str) -> Image.Image:
    """Reads an image file as upright 8-bit RGB.

    Raises:
        UnreadableImage: it is not there, cannot be decoded to the end, or a side is below 2 pixels.
    """
    with _opened(path) as image:
        return to_rgb(image)


def to_rgb(image: Image.Image) -> Image.Image:
    """Applies the EXIF orientation, and converts gray, 16-bit gray, palette, CMYK and alpha images to RGB."""
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):  # 16-bit gray, which PIL would clip to 255 instead of scaling
        image = Image.fromarray(np.clip(np.asarray(image, dtype=np.int64) >> 8, 0, 255).astype(np.uint8))
    elif image.mode == "F":
        raise ValueError("32-bit floating point pixels, whose range is unknown; convert it to 8 bits")
    elif image.mode == "P":  # its transparency is lost otherwise
        image = image.convert("RGBA")
    return image.convert("RGB")
