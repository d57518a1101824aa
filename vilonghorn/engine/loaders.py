"""The data of a run: opened and checked before work starts, and its loaders."""

import os
import re
import shlex
import warnings
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from ..data import Beton, ImageFolder, create_loader
from ..data.image_check import ImageCheck
from ..data.image_file import printable
from ..data.loaders import open_source
from ..data.loaders.config import LoaderConfig
from .config import ClassNames, Config
from .distributed import Distributed

MAX_LISTED = 1000  # files in a message

Source = ImageFolder | Beton
Split = Literal["train", "val"]


def open_data(
    config: Config, classes: ClassNames = None, splits: Sequence[Split] = ("train", "val")
) -> dict[str, Source]:
    """Opens the `splits` of the data of a run, and all images of its folders; call it in every process.

    Images that cannot be read are left out with `data.skip_unreadable`. Without `data.val`, `data.val_split` of the
    images of each class of `data.train` are held out. Warns of images that are in both parts, or in two classes.
    `classes` are the class names by label; None: those of the training data, if these are among the `splits`.
    """
    data, dist, found = config.data, Distributed(), dict[str, Source]()
    splits_val = data.val is None and data.val_split is not None and "val" in splits
    for split in sorted({"train" if split == "val" and splits_val else split for split in splits}):
        known = found["train"].classes if "train" in found and config.task.labelled else classes
        found[split] = dist.run_on_all(partial(_open, config, split, known))
    checked = {split: _checked(source, data.skip_unreadable, dist) for split, source in found.items()}
    if problems := [problem for _, problem in checked.values() if problem]:
        raise ValueError("\n".join(problems))
    found = {split: source for split, (source, _) in checked.items()}
    if splits_val:
        if not isinstance(whole := found["train"], ImageFolder):
            raise ValueError(f"data.val_split is for image folders, but data.train is {data.train}: give data.val")
        found["train"], found["val"] = whole.split(data.val_split, config.run.seed)
        if not len(found["val"].labels):
            raise ValueError(f"no class of {data.train} has two different images: none can be held out, add images")
    if dist.is_main:
        for note in _notes_on_copies([source for source in found.values() if isinstance(source, ImageFolder)]):
            warnings.warn(note, stacklevel=2)
    return {split: found[split] for split in splits}


def _open(config: Config, split: Split, classes: ClassNames) -> Source:
    key, source = f"data.{split}", getattr(config.data, split)
    kinds = "a folder with one folder of images for each class, or a .beton file"
    if source is None:
        others = " or, to hold out a part of data.train, --data.val_split 0.2" if split == "val" else ""
        raise ValueError(f"{key} is missing: give --{key}, {kinds}{others}")
    kind, _, rest = source.partition("/")
    if kind in ("hfds", "wds"):
        given = shlex.quote(f"hf:{rest}") if kind == "hfds" else rest if rest.endswith(".tar") else f"{rest}/*.tar"
        target = re.sub(r"\W+", "-", Path(rest).stem).strip("-") + ".beton"
        remedy = f"type vilonghorn beton {given} {target}, and give {target}"
        raise ValueError(f"{key} is {source}, but training reads .beton files and image folders: {remedy}")
    if not Path(source).exists():
        problem = f"{key} is {source}, but there is no {Path(source).absolute()}"
        raise FileNotFoundError(f"{problem}: expected {kinds} (vilonghorn beton writes it)")
    return open_source(source, config.task.labelled, config.data.max_pixels, classes)


def _checked(source: Source, skip: bool, dist: Distributed) -> tuple[Source, str]:
    """An image folder with `digests`, without unreadable images; and a text about these if they may not be skipped."""
    if not isinstance(source, ImageFolder):
        return source, ""
    check = dist.run_on_all(lambda: ImageCheck(source))
    dist.run_on_all(lambda: check.open(dist.rank, dist.world_size))
    parts = [np.s_[rank :: dist.world_size] for rank in range(dist.world_size)]
    own = parts[dist.rank]  # of which a process sends also what its cache has: those of several machines differ
    for part, found in zip(parts, dist.gather((check.digests[own], check.problems[own]))):
        check.digests[part], check.problems[part] = found
    if dist.is_main and dist.world_size > 1:
        check.keep()
    source.digests = check.digests
    bad = np.flatnonzero(check.problems != "")
    if not len(bad):
        return source, ""
    lines = [f"{printable(source.paths[i])}: {check.problems[i]}" for i in bad]
    counted = f"{len(bad)} of {len(source.paths)} images of {source.path} cannot be read"
    if not skip or len(bad) == len(source.paths):
        remedy = "repair or remove them; --data.skip_unreadable true (data split: --skip-unreadable) leaves them out"
        return source, _listed(f"{counted} ({remedy}):", lines)
    if dist.is_main:
        warnings.warn(_listed(f"{counted} and are left out:", lines), stacklevel=3)
    return source.select(check.problems == ""), ""


def _notes_on_copies(folders: list[ImageFolder]) -> list[str]:
    """Sentences that name images that are in two classes of a folder, or in two folders."""
    first: dict[bytes, tuple[ImageFolder, int]] = {}
    pairs: dict[str, list[str]] = {}
    same_place = len({os.path.realpath(folder.path) for folder in folders}) < len(folders)
    for folder in folders:
        for i, digest in enumerate(map(bytes, folder.digests)):
            other, j = first.setdefault(digest, (folder, i))
            if other is folder and folder.labels[i] != folder.labels[j]:
                what = "in two classes"
            elif other is not folder and not same_place:
                what = "in the training and in the held-out data"
            else:
                continue
            pairs.setdefault(what, []).append(f"{printable(other.paths[j])} is {printable(folder.paths[i])}")
    return [_listed(f"{len(p)} images are {what}: remove one of each pair", p) for what, p in pairs.items()]


def _listed(title: str, lines: list[str]) -> str:
    """A title and indented lines, at most MAX_LISTED."""
    more = [f"and {len(lines) - MAX_LISTED} more"] * (len(lines) > MAX_LISTED)
    return "\n  ".join([title, *lines[:MAX_LISTED], *more])


def build_loader(
    config: Config,
    device: torch.device | str,
    *,
    training: bool,
    split: Split | None = None,
    classes: ClassNames = None,
    source: Source | None = None,
) -> Any:
    """The loader of `data.train`, augmented for training, or of `data.val`, of which each process reads a part.

    `split` is "train" to read `data.train` without augmentation, as held-out data. `classes` are the class names by
    label, of which held-out data may lack some; None: those of the data. `source` is what `open_data` has returned.
    """
    dist, split = Distributed(), split or ("train" if training else "val")
    source = open_data(config, classes, [split])[split] if source is None else source
    known = {field.name for field in fields(LoaderConfig)}
    given = vars(config.data) | (vars(config.augmentation) if training else {})
    options = {name: value for name, value in given.items() if name in known}
    options |= {"seed": config.run.seed, "device": device, "classes": classes, "labelled": config.task.labelled}
    return create_loader(source, training=training, rank=dist.rank, world_size=dist.world_size, **options)


def check_classes(train: str | None, num_classes: int, names: ClassNames, val: str | None, loader: Any) -> None:
    """Raises ValueError if `train` has one class, or not as many as the `loader` of `val`.

    Warns if both are one source, or the classes of `val` alone have names: they are not matched to those of `train`.
    """
    name, held_out = train or "the training data", val or "the held-out data"
    if num_classes == 1:
        raise ValueError(f"{name} has one class only: give a folder with one folder of images for each class")
    if loader.num_classes != num_classes:
        same = "training and held-out data need the same"
        raise ValueError(f"{name} has {num_classes} classes but {held_out} has {loader.num_classes}: {same}")
    if names is None and Distributed().is_main and (found := getattr(loader, "class_names", None)):
        taken = f"label 0 is taken for {printable(found[0])} of {held_out}, and so on"
        warnings.warn(f"the classes of {name} have no names: {taken}", stacklevel=2)
    if train and val and Distributed().is_main and os.path.realpath(train) == os.path.realpath(val):
        warnings.warn(f"{val} is data.train, too: the results are not of held-out images", stacklevel=2)
