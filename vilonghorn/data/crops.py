"""Boxes of random resized crops and centre crops for a batch. The loaders cut them."""

import numpy as np

ATTEMPTS = 10  # as in torchvision's RandomResizedCrop, whose distribution the crops have


def random_crops(
    draws: np.ndarray, heights: np.ndarray, widths: np.ndarray, scale: tuple[float, float], ratio: tuple[float, float]
) -> np.ndarray:
    """Random resized crops: area uniform in `scale`, aspect ratio log-uniform in `ratio`, position uniform.

    The first of ten attempts that fits into the image, else its centre with the aspect ratio clipped to `ratio`.

    Args:
        draws: (B, 4 * ATTEMPTS) uniform numbers.
        heights: (B,) of the images, in pixels.
        widths: (B,) likewise.
        scale: area of the crop as a fraction of the image.
        ratio: width over height of the crop.

    Returns:
        (B, 4) int64: top, bottom, left, right.
    """
    area, aspect, down, right = draws.reshape(len(draws), ATTEMPTS, 4).transpose(2, 0, 1)
    target = (heights * widths)[:, None] * (scale[0] + (scale[1] - scale[0]) * area)
    aspect = np.exp(np.log(ratio[0]) + (np.log(ratio[1]) - np.log(ratio[0])) * aspect)
    w = np.rint(np.sqrt(target * aspect)).astype(np.int64)
    h = np.rint(np.sqrt(target / aspect)).astype(np.int64)
    fits = (w >= 1) & (h >= 1) & (w <= widths[:, None]) & (h <= heights[:, None])
    rows, first = np.arange(len(draws)), fits.argmax(1)
    w, h, down, right = (value[rows, first] for value in (w, h, down, right))
    top = (down * (heights - h + 1)).astype(np.int64)
    left = (right * (widths - w + 1)).astype(np.int64)

    clipped = np.clip(widths / heights, *ratio)
    centre_w = np.clip(np.rint(np.minimum(widths, heights * clipped)), 1, None).astype(np.int64)
    centre_h = np.clip(np.rint(np.minimum(heights, widths / clipped)), 1, None).astype(np.int64)
    fitted = fits.any(1)
    w, h = np.where(fitted, w, centre_w), np.where(fitted, h, centre_h)
    top, left = np.where(fitted, top, (heights - h) // 2), np.where(fitted, left, (widths - w) // 2)
    return np.stack([top, top + h, left, left + w], axis=1)


def center_crops(heights: np.ndarray, widths: np.ndarray, size: tuple[int, int], crop_pct: float) -> np.ndarray:
    """Centre crops: the largest box of the output's shape, times `crop_pct`.

    Args:
        heights: (B,) of the images, in pixels.
        widths: (B,) likewise.
        size: (height, width) of the output.
        crop_pct: side of the crop as a fraction of the largest that fits.

    Returns:
        (B, 4) int64: top, bottom, left, right.
    """
    aspect = size[1] / size[0]
    h = crop_pct * np.minimum(heights, widths / aspect)
    w = np.clip(np.rint(h * aspect), 1, widths).astype(np.int64)
    h = np.clip(np.rint(h), 1, heights).astype(np.int64)
    top, left = (heights - h) // 2, (widths - w) // 2
    return np.stack([top, top + h, left, left + w], axis=1)
