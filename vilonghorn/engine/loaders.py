"""The loaders of a run."""

import os
import re
import shlex
import warnings
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import torch

from ..data import create_loader
from ..data.loaders.config import LoaderConfig
from .config import Config
from .distributed import Distributed


def build_loader(
    config: Config,
    device: torch.device | str,
    *,
    training: bool,
    split: Literal["train", "val"] | None = None,
    classes: Sequence[str] | None = None,
) -> Any:
    """The loader of `data.train`, augmented for training, or of `data.val`, of which each process reads a part.

    `split` is "train" to read `data.train` without augmentation, as held-out data; None: the usual one.
    `classes` are the class names by label; held-out data may lack some. None: those of the data.

    Raises FileNotFoundError or ValueError if there is no such data, and the errors of `create_loader`.
    """
    data, dist = config.data, Distributed()
    split = split or ("train" if training else "val")
    key, source = f"data.{split}", getattr(data, split)
    kind, _, rest = source.partition("/")
    if kind in ("hfds", "wds"):
        given = shlex.quote(f"hf:{rest}") if kind == "hfds" else rest if rest.endswith(".tar") else f"{rest}/*.tar"
        target = re.sub(r"\W+", "-", Path(rest).stem).strip("-") + ".beton"
        raise ValueError(
            f"{key} is {source}, but training reads .beton files and image folders: "
            f"type vilonghorn beton {given} {target}, and give {target}"
        )
    if not Path(source).exists():
        raise FileNotFoundError(
            f"{key} is {source}, but there is no {Path(source).absolute()}: expected a folder with one folder "
            "of images for each class, or the .beton file that vilonghorn beton FOLDER FILE makes of it"
        )
    options = {"seed": config.run.seed, "device": device, "classes": classes}
    options |= {"rank": dist.rank, "world_size": dist.world_size, "labelled": config.task.labelled}
    known = {field.name for field in fields(LoaderConfig)}
    given = vars(data) | (vars(config.augmentation) if training else {})
    return create_loader(source, training=training, **{k: v for k, v in given.items() if k in known} | options)


def check_classes(name: str, num_classes: int, val: str, loader: Any) -> None:
    """Raises ValueError if held-out data has more or fewer classes than the training data or the model `name`.

    Warns if both are the same data.
    """
    if loader.num_classes != num_classes:
        same = "training and held-out data need the same"
        raise ValueError(f"{name} has {num_classes} classes but {val} has {loader.num_classes}: {same}")
    if Distributed().is_main and os.path.realpath(name) == os.path.realpath(val):
        warnings.warn(f"{val} is data.train, too: the results are not of held-out images", stacklevel=2)
