"""One sample of a dataset, checked, as a row of `.beton` metadata and the bytes of its image."""

from __future__ import annotations

import io
import operator
from typing import Any, Protocol

import numpy as np
from PIL import Image

from ..images import MIN_SIDE, UnreadableImage, to_rgb
from .format import MAX_CLASSES, MODES, SAMPLE


class MapDataset(Protocol):
    """What can be written: an indexable of (PIL image or uint8 array, integer label)."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> tuple[Any, Any]: ...


def stored_size(width: int, height: int, max_resolution: int, name: str) -> tuple[int, int]:
    """The (width, height) at which an image is stored.

    Raises:
        UnreadableImage: a side would have less than 2 pixels; the message begins with `name`.
    """
    shrink = min(1.0, max_resolution / max(width, height))
    stored = round(width * shrink), round(height * shrink)
    if min(stored) < MIN_SIDE:
        raise UnreadableImage(
            f"{name}: {width}x{height} pixels are stored as {stored[0]}x{stored[1]}, and each side must have at least "
            f"{MIN_SIDE}; remove the image or raise max_resolution"
        )
    return stored


def encode_sample(
    source: MapDataset, index: int, *, as_jpeg: bool, max_resolution: int, quality: int, num_classes: int | None
) -> tuple[np.ndarray, bytes]:
    """Reads and encodes a sample.

    Args:
        source: the dataset.
        index: of the sample.
        as_jpeg: store JPEG of this `quality`, not 8-bit pixels.
        max_resolution: larger images are shrunk, so that no side has more pixels.
        num_classes: labels must be below it; None where it is not known.

    Returns:
        Its row of metadata, all but the pointer, and its image data.

    Raises:
        TypeError, ValueError: the image or the label is not as `MapDataset` says; the message names the sample.
    """
    image, label = source[index]
    name = f"sample {index}"
    try:
        label = operator.index(label)
    except TypeError:
        raise TypeError(f"{name}: label {label!r} is a {type(label).__name__}; expected an integer") from None
    limit = MAX_CLASSES if num_classes is None else num_classes
    if not 0 <= label < limit:
        raise ValueError(f"{name}: label {label}; expected 0 to {limit - 1}")
    image = _as_image(image, name)
    size = stored_size(*image.size, max_resolution, name)
    if size != image.size:
        image = image.resize(size, Image.Resampling.BICUBIC, reducing_gap=3.0)
    if as_jpeg:
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=quality)
        data = buffer.getvalue()
    else:
        data = image.tobytes()
    row = np.zeros((), SAMPLE)
    row["label"] = label
    row["image"] = (MODES["jpg" if as_jpeg else "raw"], *size, 0)
    return row, data


def _as_image(image: Any, name: str) -> Image.Image:
    if isinstance(image, np.ndarray):
        gray = image.ndim == 2 or (image.ndim == 3 and image.shape[2] == 1)
        if image.dtype != np.uint8 or not (gray or (image.ndim == 3 and image.shape[2] == 3)) or image.size == 0:
            raise ValueError(
                f"{name}: array {image.shape} of {image.dtype}; expected uint8 of shape (H, W), (H, W, 1) or (H, W, 3)"
            )
        image = Image.fromarray(image.squeeze(2) if gray and image.ndim == 3 else image)
    if not isinstance(image, Image.Image):
        raise TypeError(f"{name}: image is a {type(image).__name__}; expected a PIL image or a uint8 numpy array")
    try:
        return to_rgb(image)
    except (OSError, ValueError) as error:
        raise UnreadableImage(f"{name}: not a usable image ({error})") from error
