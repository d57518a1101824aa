"""The one way to a loader: from a `.beton`, through FFCV, or from an image folder, through timm's transforms."""

from __future__ import annotations

import importlib.util
import os
import warnings
from pathlib import Path

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from ..beton.format import check_beton
from ..images import ImageFolder
from ..threads import available_cpus
from .base import Loader, torch_threads_kept
from .settings import LoaderSettings

_said: set[str] = set()


def create_loader(
    source: str | os.PathLike,
    *,
    batch_size: int,
    image_size: int | tuple[int, int],
    training: bool,
    seed: int = 0,
    workers: int | None = None,
    device: str | torch.device = "cpu",
    mean: tuple[float, float, float] = IMAGENET_DEFAULT_MEAN,
    std: tuple[float, float, float] = IMAGENET_DEFAULT_STD,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    hflip: float = 0.5,
    crop_pct: float = 0.875,
    interpolation: str | None = None,
    drop_last: bool | None = None,
    repeats: int = 1,
    auto_augment: str | None = None,
    color_jitter: float = 0.0,
    erase: float = 0.0,
    start_size: int | None = None,
    ramp: tuple[int, int] = (0, 0),
    rank: int = 0,
    world_size: int = 1,
) -> Loader:
    """Makes a loader of normalised batches, the same for both kinds of source.

    Training takes seeded random resized crops and flips in a shuffled order, and augments them on the device; otherwise
    centre crops in the order of the source. A `.beton` is read by FFCV, a folder by PIL in timm's transforms.

    Args:
        source: a `.beton` file, or an image folder (`root/class/image`).
        batch_size: samples in a batch, of one rank.
        image_size: side of the images in pixels, or (height, width).
        training: augment and shuffle.
        seed: of order and augmentation.
        workers: decoding threads (`.beton`) or processes (folder; 0 reads in this one); default one for each CPU, at
            most 8 processes.
        device: where the batches are put.
        mean, std: of the normalisation, for pixels in 0 to 1.
        scale, ratio: area (as a fraction) and width over height of the random crops.
        hflip: probability of a horizontal flip.
        crop_pct: side of the centre crop as a fraction of the largest that fits.
        interpolation: of crops to the size of the images: "area" (averages, FFCV's own and the fastest) or "bicubic"
            (with antialiasing, PIL's); default area in training of a `.beton`, else bicubic.
        drop_last: leave out the last batch where it is not full; default when training.
        repeats: repeated augmentation: each sample is shown so often in a row, and an epoch shows 1 / repeats of them.
        auto_augment: timm's name of a RandAugment or AutoAugment policy, such as "rand-m9-mstd0.5-inc1", or "3a", the
            3-Augment of DeiT III.
        color_jitter: strength of brightness, contrast and saturation, 0 to 1; as in timm, a policy other than "3a"
            takes its place.
        erase: probability that a rectangle of the image is replaced by normal noise.
        start_size: side of the images in the first epochs, in pixels, where it is to grow to `image_size`.
        ramp: epochs (first, last) between which it grows: `start_size` up to the first, `image_size` from the last.
        rank, world_size: which share of every batch this process reads, of how many.

    Returns:
        A loader; `loader.epoch(e)` iterates over (images, targets).

    Raises:
        FileNotFoundError: there is no such source.
        ImportError: the source is a `.beton` and FFCV cannot be imported.
        ValueError: an option is out of range, the folder has no images, or the `.beton` is not whole (BetonError).
    """
    source = Path(source)
    from_folder = source.is_dir()
    if workers is None:
        workers = min(8, available_cpus()) if from_folder else available_cpus()
    settings = LoaderSettings(
        batch_size=batch_size,
        image_size=(image_size, image_size) if isinstance(image_size, int) else tuple(image_size),
        training=training,
        seed=seed,
        workers=workers,
        device=torch.device(device),
        mean=tuple(mean),
        std=tuple(std),
        scale=tuple(scale),
        ratio=tuple(ratio),
        hflip=hflip,
        crop_pct=crop_pct,
        interpolation=interpolation or ("area" if training and not from_folder else "bicubic"),
        repeats=repeats,
        auto_augment=auto_augment,
        color_jitter=color_jitter,
        erase=erase,
        start_size=start_size,
        ramp=tuple(ramp),
        rank=rank,
        world_size=world_size,
        drop_last=training if drop_last is None else drop_last,
    )
    if from_folder:
        from .folder import FolderLoader

        folder = ImageFolder(source)
        if importlib.util.find_spec("ffcv") is None:
            _say_once("FFCV is not installed: reading images from their folder with PIL, which is slower than a .beton")
        return FolderLoader(folder, settings)
    beton = check_beton(source)
    try:
        with torch_threads_kept():
            from .ffcv import FFCVLoader
    except (ImportError, OSError) as error:
        raise ImportError(
            f"{source}: reading a .beton needs FFCV, which cannot be imported ({error}); install the extra "
            "vilonghorn[ffcv] as its documentation says, or give the image folder instead"
        ) from error
    return FFCVLoader(beton, settings)


def _say_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        warnings.warn(message, stacklevel=3)
