"""Image files as upright 8-bit RGB."""

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
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
MAX_PIXELS = 89_478_485  # above, PIL warns of an image that is small as a file and fills the memory
MIN_SIDE = 2  # pixels; a centre crop of half of one pixel is empty, and FFCV aborts the process on an empty crop
TURNS = "FLIP_LEFT_RIGHT ROTATE_180 FLIP_TOP_BOTTOM TRANSPOSE ROTATE_270 TRANSVERSE ROTATE_90".split()
ORIENTATIONS = {number: Image.Transpose[name] for number, name in enumerate(TURNS, 2)}  # of EXIF
PHOTOMETRIC, WHITE_IS_ZERO = 262, 0  # a tag of TIFF and its value
PNG_SCALE = {"L;2": 85, "L;4": 17, "RGB;16B": 1 / 256}  # of PIL's raw modes that become 8 bits
# Errors of the machine, not of a file.
IO_ERRORS = {getattr(errno, name, -1) for name in ("EIO", "EMFILE", "ENFILE", "ENOMEM", "ESTALE", "EREMOTEIO")}


class UnreadableImage(ValueError):
    """An image that cannot be decoded, or is too small; the message names it."""


def printable(name: str) -> str:
    """Escapes control characters, which a terminal obeys, and bytes that are not UTF-8, as repr does."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


def read_image(path: str | os.PathLike, max_pixels: int = MAX_PIXELS, file: IO[bytes] | None = None) -> Image.Image:
    """Reads an image file of one of `FORMATS` as upright 8-bit RGB; see `to_rgb`.

    Args:
        path: the file; its extension does not count.
        max_pixels: largest width times height; in this process it raises `PIL.Image.MAX_IMAGE_PIXELS`, if that is less.
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
        reason = f"its content is none of {', '.join(FORMATS)}" if unknown else printable(" ".join(str(error).split()))
        raise UnreadableImage(f"{name}: not a readable image ({reason}); convert, repair or remove it") from error


def image_sizes(paths: Sequence[str], most: int = 64) -> np.ndarray:
    """(n, 2) int64: upright width and height of up to `most` evenly spaced images, without those that are damaged."""
    sizes = []
    for path in filter(os.path.isfile, paths[:: max(1, -(-len(paths) // most))]):
        with suppress(Exception), Image.open(path, formats=FORMATS) as image:  # `read_image` says what is wrong
            orientation = as_number(image.getexif().get(ExifTags.Base.Orientation))
            is_turned = orientation in (5, 6, 7, 8) and image.format != "TIFF"  # whose size PIL turns
            sizes.append(image.size[::-1] if is_turned else image.size)
    return np.array(sizes, np.int64).reshape(-1, 2)


@contextmanager
def explain_resize(path: str | os.PathLike, image: Image.Image) -> Iterator[None]:
    """Names an image that a transform cannot resize, such as a line that would have no height, in a ValueError."""
    try:
        yield
    except ValueError as error:
        size = f"{image.width}x{image.height}"
        raise ValueError(f"{printable(str(path))}: its {size} pixels cannot be resized: {error}; crop it") from error


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

    Raises ValueError if pixels are of unknown range: they have 32 bits, or 16 bits of which the highest two are 0.
    """
    if image.mode == "F" or (image.mode == "I" and image.format not in ("PNG", "PPM")):  # those have 16 bits
        kind = "floating point numbers" if image.mode == "F" else "integers"
        raise ValueError(f"its pixels are 32-bit {kind}, of unknown range; convert it to 8 bits")
    if image.mode.startswith("I") and getattr(image, "tag_v2", {}).get(PHOTOMETRIC) == WHITE_IS_ZERO:
        raise ValueError("its 16-bit pixels are white where they are 0, which PIL ignores; convert it to 8 bits")
    is_gray = image.mode.startswith("I")
    is_of_no_file = image.format is None
    has_16_bits = image.format in ("PNG", "TIFF") or (is_gray and is_of_no_file)  # PIL scales PPM
    tile = getattr(image, "tile", None)
    raw = tile[0].args if tile else None  # PIL's name of the stored mode, or a tuple that begins with it
    raw = raw[0] if isinstance(raw, tuple) and raw else raw
    image.load()  # PIL turns a TIFF when it reads the pixels
    if raw in PNG_SCALE and "transparency" in image.info:  # PIL scales the pixels to 8 bits, but not this colour
        color = (np.array(image.info["transparency"]) * PNG_SCALE[raw]).astype(int)
        image.info["transparency"] = tuple(color.tolist()) if color.ndim else int(color)
    turn = ORIENTATIONS.get(as_number(image.getexif().get(ExifTags.Base.Orientation)))  # PIL fails on damaged EXIF
    image = image.copy() if turn is None else image.transpose(turn)
    if has_16_bits and (is_gray or "16" in str(raw)):
        highest = np.atleast_3d(np.asarray(image))[..., : 1 if "A" in image.mode[:2] else 3].max()
        if 0 < highest < (1 << 14 if is_gray else 1 << 6):  # PIL has reduced colours to 8 bits
            raise ValueError("its pixels have 16 bits, of which the highest two are 0; scale or convert it to 8 bits")
    if is_gray:  # 16 bits, which PIL would clip to 255 instead of scaling
        pixels = np.asarray(image, dtype=np.int64)
        pixels = np.where(pixels == image.info.get("transparency", -1), 0xFFFF, pixels)
        image = Image.fromarray(np.clip(pixels >> 8, 0, 255).astype(np.uint8))
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    image = image if image.mode == "RGB" else image.convert("RGB")
    image.info.clear()  # else the orientation would be applied again
    return image


def as_number(value: object) -> object:
    """The number in a tag of EXIF that has the type BYTE, UNDEFINED or ASCII; others are numbers already."""
    if isinstance(value, bytes) and len(value) == 1:
        return value[0]
    return int(value) if isinstance(value, str) and value.strip("\0 ").isdecimal() else value
