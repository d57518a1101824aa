"""Loaders of normalised batches: from a `.beton` by FFCV, from an image folder by timm's transforms."""

import os
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from timm.layers import to_2tuple

from ..beton.format import Beton, check_beton
from ..image_file import describe_crop, image_sizes, printable
from ..image_folder import ImageFolder, UnlabelledFolder, shorten
from ..threads import available_cpus
from .config import LoaderConfig
from .loader import FolderLoader, Loader


def create_loader(source: str | os.PathLike | ImageFolder | Beton, **options: Any) -> Loader:
    """Makes a loader of normalised batches, the same for both kinds of source.

    Training takes seeded random resized crops and flips in a shuffled order, and augments them on the device; otherwise
    centre crops in the order of the source. A `.beton` is read by FFCV, a folder by PIL in timm's transforms.

    Args:
        source: a `.beton` file or an image folder (`root/class/image`), or what `check_beton` or `ImageFolder` returns.
        options: fields of `LoaderConfig`.

    Returns:
        A loader; `loader.epoch(e)` iterates over (images, targets).

    Raises:
        FileNotFoundError: there is no such source.
        ImportError: the source is a `.beton` and FFCV cannot be imported.
        TypeError: an option is unknown, or a required one is missing.
        ValueError: an option is out of range, the folder has no images or a class that is not among `classes`, or the
            `.beton` is damaged (BetonError) or has no checksums, which `checksums=True` requires.

    Warns:
        What a user may not expect: files that are left out, classes without images, checks that cannot be made.
    """
    config = LoaderConfig(**options)
    data = source
    if not isinstance(data, ImageFolder | Beton):
        data = open_source(data, config.labelled, config.max_pixels, config.classes)
    from_folder = isinstance(data, ImageFolder)
    if config.workers is None:
        cpus = max(1, available_cpus() // int(os.environ.get("LOCAL_WORLD_SIZE") or 1))  # torchrun's share them
        config = replace(config, workers=min(8, cpus) if from_folder else cpus)
    if config.interpolation is None:
        by_area = config.training and not from_folder
        config = replace(config, interpolation="area" if by_area else "bicubic")
    notes = [*data.notes]
    if isinstance(data, Beton):
        if config.checksums and data.checksums is None:
            raise ValueError(f"{data.notes[0]} (checksums is true; null reads it as it is)")
        if config.classes is not None and config.labelled:
            named = data.with_classes(config.classes)
            if data.classes is None:
                first = f"label 0 is taken for {printable(named.classes[0])}, and so on"
                notes.append(f"{data.path}: its labels have no names: {first}")
            data = named
    for note in [*notes, *_notes(data, config)] if config.rank == 0 else ():
        warnings.warn(note, stacklevel=2)
    if isinstance(data, ImageFolder):
        return FolderLoader(data, config)
    try:
        from .ffcv import FFCVLoader
    except (ImportError, OSError) as error:
        problem = f"{data.path}: reading a .beton needs FFCV, which cannot be imported ({error})"
        build = "run ./setup.sh in a clone of vilonghorn, which builds it (vilonghorn[ffcv] has only what FFCV imports)"
        raise ImportError(f"{problem}; {build}, or give the image folder") from error
    return FFCVLoader(data, config)


def open_source(
    source: str | os.PathLike, labelled: bool, max_pixels: int, classes: Sequence[str] | None = None
) -> ImageFolder | Beton:
    """Opens a `.beton` file or an image folder, without reading images; the arguments are those of `LoaderConfig`."""
    if not Path(source).is_dir():
        return check_beton(source)
    return (ImageFolder if labelled else UnlabelledFolder)(source, max_pixels, classes)


def _notes(data: ImageFolder | Beton, config: LoaderConfig) -> list[str]:
    """Sentences on classes that are not used or have no images, and on what evaluation shows of an image."""
    counts = np.bincount(data.labels, minlength=data.num_classes)
    missing = np.flatnonzero(counts == 0) if config.labelled else ()
    names = shorten([data.classes[label] if data.classes else f"label {label}" for label in missing[:6]])
    notes = [f"no image of {len(missing)} of {len(counts)} classes: {names}"] * (len(missing) > 0)
    if not config.labelled and data.num_classes > 1:
        notes.append(f"its classes ({data.num_classes}) are not used to learn from images without labels")
    if not config.training:
        if isinstance(data, ImageFolder):
            sizes = image_sizes(data.paths)
        else:
            sizes = np.stack([data.images["width"], data.images["height"]], 1)
        shape = to_2tuple(config.image_size)[::-1]
        notes += filter(None, [describe_crop(sizes / shape, config.crop_pct, config.crop_mode)])
    return [f"{data.path}: {note}" for note in notes]
