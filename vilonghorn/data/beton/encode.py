"""Encodes one sample of a dataset, checked, as a row of `.beton` metadata and the bytes of its image."""

import io
import operator
from typing import Any, Protocol

import numpy as np
from PIL import Image

from ..images import MIN_SIDE, UnreadableImage, to_rgb
from .format import MODES, SAMPLE

JPEG_QUALITY = 90  # by default
JPEG_SIZE = 0.08  # of the raw size, at least, of a photograph at that quality; for the check of the disk's space


class MapDataset(Protocol):
    """What can be written: an indexable of (PIL image or uint8 array, integer label)."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> tuple[Any, Any]: ...


def stored_size(width: int, height: int, max_resolution: int, name: str) -> tuple[int, int]:
    """(width, height) at which an image is stored. Raises UnreadableImage if a side would have less than 2 pixels."""
    shrink = min(1.0, max_resolution / max(width, height))
    stored = round(width * shrink), round(height * shrink)
    if min(stored) < MIN_SIDE:
        raise UnreadableImage(
            f"{name}: {width}x{height} pixels are stored as {stored[0]}x{stored[1]}, and each side must have at least "
            f"{MIN_SIDE}; remove the image or raise max_resolution"
        )
    return stored


def encode_sample(
    image: Any, label: Any, name: str, max_resolution: int, quality: int | None, num_classes: int
) -> tuple[np.ndarray, bytes]:
    """Checks and encodes a sample of a `MapDataset`: its row of metadata without the pointer, and its image data.

    Args:
        image: PIL image or array.
        label: below `num_classes`.
        name: of the sample, for messages.
        max_resolution: larger images are shrunk until no side has more pixels.
        quality: of a JPEG, 1 to 100; None to store 8-bit pixels.
        num_classes: upper limit of labels.

    Raises:
        TypeError, ValueError: the image or the label is not as `MapDataset` says.
    """
    try:
        label = operator.index(label)
    except TypeError:
        raise TypeError(f"{name}: label {label!r} is a {type(label).__name__}; expected an integer") from None
    if not 0 <= label < num_classes:
        raise ValueError(f"{name}: label {label}; expected 0 to {num_classes - 1}")
    image = _as_rgb(image, name)
    size = stored_size(*image.size, max_resolution, name)
    if size != image.size:
        image = image.resize(size, Image.Resampling.BICUBIC, reducing_gap=3.0)
    if quality is None:
        mode, data = "raw", image.tobytes()
    else:
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=quality)
        mode, data = "jpg", buffer.getvalue()
    row = np.zeros((), SAMPLE)  # zeros, because the bytes between the fields are written, too
    row["label"], row["image"] = label, (MODES[mode], *size, 0)
    return row, data


def _as_rgb(image: Any, name: str) -> Image.Image:
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.shape[2:] not in ((), (1,), (3,)) or image.ndim < 2 or image.size == 0:
            raise ValueError(
                f"{name}: array {image.shape} of {image.dtype}; expected uint8 of shape (H, W), (H, W, 1) or (H, W, 3)"
            )
        image = Image.fromarray(image.squeeze(2) if image.shape[2:] == (1,) else image)
    if not isinstance(image, Image.Image):
        raise TypeError(f"{name}: image is a {type(image).__name__}; expected a PIL image or a uint8 numpy array")
    try:
        return to_rgb(image)
    except (OSError, ValueError) as error:
        raise UnreadableImage(f"{name}: not a usable image ({error})") from error
