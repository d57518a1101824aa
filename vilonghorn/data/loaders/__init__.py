"""Loaders of normalised batches: from a `.beton` by FFCV, from an image folder by timm's transforms."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..beton.format import check_beton
from ..images import ImageFolder
from ..threads import available_cpus
from .config import LoaderConfig
from .loader import FolderLoader, Loader


def create_loader(source: str | os.PathLike, config: LoaderConfig | None = None, **options: Any) -> Loader:
    """Makes a loader of normalised batches, the same for both kinds of source.

    Training takes seeded random resized crops and flips in a shuffled order, and augments them on the device; otherwise
    centre crops in the order of the source. A `.beton` is read by FFCV, a folder by PIL in timm's transforms.

    Args:
        source: a `.beton` file, or an image folder (`root/class/image`).
        config: the options; default: from `options` alone.
        options: fields of `LoaderConfig`, which replace those of `config`.

    Returns:
        A loader; `loader.epoch(e)` iterates over (images, targets).

    Raises:
        FileNotFoundError: there is no such source.
        ImportError: the source is a `.beton` and FFCV cannot be imported.
        TypeError: an option is unknown, or a required one is missing.
        ValueError: an option is out of range, the folder has no images, or the `.beton` is damaged (BetonError).
    """
    config = LoaderConfig(**options) if config is None else replace(config, **options)
    source = Path(source)
    from_folder = source.is_dir()
    if config.workers is None:
        config = replace(config, workers=min(8, available_cpus()) if from_folder else available_cpus())
    if config.interpolation is None:
        by_area = config.training and not from_folder
        config = replace(config, interpolation="area" if by_area else "bicubic")
    if from_folder:
        return FolderLoader(ImageFolder(source, config.max_pixels), config)
    beton = check_beton(source)
    try:
        from .ffcv import FFCVLoader
    except (ImportError, OSError) as error:
        raise ImportError(
            f"{source}: reading a .beton needs FFCV, which cannot be imported ({error}); run ./setup.sh in a clone of "
            "vilonghorn, which builds it (vilonghorn[ffcv] has only what FFCV imports), or give the image folder"
        ) from error
    return FFCVLoader(beton, config)
