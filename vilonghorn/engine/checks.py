"""What makes a configuration valid, and which of its keys may change when a run goes on.

Whether data exists and its labels fit is left to the loaders and the trainer, which look at it.
"""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import timm

from .. import models  # noqa: F401  (registers ours with timm, so that their names count as known)
from ..data.augment.policy import Policy
from .config import FIELDS, INTERVALS, Config

# The same run goes on where only these differ: where it lies, what it runs on, what it reports. The images of an update,
# which `accumulate` and the number of processes make together, are compared by the trainer.
FREE_ON_RESUME = frozenset(
    "data.train data.val data.workers run.dir run.device run.log_updates run.checkpoint_updates "
    "run.checkpoint_seconds run.max_skipped run.tensorboard optimizer.accumulate".split()
)
FEW = 40  # names that a sentence may list


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence that rejects `name`: the known names nearest to it."""
    known = list(known)
    close = [k for k in known if k.rpartition(".")[2] == name.lstrip("-").rpartition(".")[2]]
    close += [k for k in difflib.get_close_matches(name, known, n=3, cutoff=0.5) if k not in close]
    if close:
        return f"the nearest known are {', '.join(close[:4])}"
    return f"known are {', '.join(known)}" if len(known) <= FEW else f"none of the {len(known)} known names is near it"


def reason_of(error: Exception) -> str:
    """An error's kind and words in one line, for a sentence that says what it keeps from being done."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def flatten(values: dict[str, Any]) -> dict[str, Any]:
    """Nested sections to {"section.key": value}."""
    return {f"{name}.{key}": value for name, section in values.items() for key, value in section.items()}


def check(config: Config) -> None:
    """Refuses a configuration that cannot run.

    Raises:
        ValueError: one sentence that names the key, its value and what is expected.
    """
    values = flatten(asdict(config))
    for key, interval in INTERVALS.items():
        low, high = (float(end) for end in interval[1:-1].split(","))
        inside = {"[": operator.le, "(": operator.lt}[interval[0]], {"]": operator.le, ")": operator.lt}[interval[-1]]
        numbers = values[key] if isinstance(values[key], Sequence) else [values[key]]
        if not all(n is None or (inside[0](low, n) and inside[1](n, high)) for n in numbers):
            raise ValueError(f"{key} is {values[key]}; it must lie in {interval}")
    for key in ("augmentation.scale", "augmentation.ratio", "augmentation.ramp"):
        if values[key][0] > values[key][1]:
            raise ValueError(f"{key} is {list(values[key])}; the smaller bound comes first")
    if config.schedule.warmup_epochs >= config.schedule.epochs:
        raise ValueError(
            f"schedule.warmup_epochs is {config.schedule.warmup_epochs}; it must be less than schedule.epochs, "
            f"{config.schedule.epochs}"
        )
    augmentation, size = config.augmentation, config.data.image_size
    if augmentation.auto_augment:
        Policy(augmentation.auto_augment, config.data.mean)
    if augmentation.start_size and augmentation.start_size > size:
        raise ValueError(
            f"augmentation.start_size is {augmentation.start_size}, above data.image_size, which is {size}"
        )
    if augmentation.start_size and not augmentation.ramp[1]:
        raise ValueError(
            f"augmentation.start_size is {augmentation.start_size} but augmentation.ramp is {list(augmentation.ramp)}, so "
            "that no image would have it: give the epochs between which images grow"
        )
    if config.model.weights and config.model.pretrained:
        raise ValueError(f"model.weights is {config.model.weights} and model.pretrained is true: give one of them")
    if (config.augmentation.mixup or config.augmentation.cutmix) and config.data.batch_size % 2:
        raise ValueError(
            f"data.batch_size is {config.data.batch_size}; mixup and cutmix pair images, so it must be even"
        )
    for name, known, key in (
        (config.model.name, timm.list_models(), "model.name"),
        (config.optimizer.name, timm.optim.list_optimizers(), "optimizer.name"),
    ):
        if name.partition(".")[0] not in known:
            raise ValueError(f"{key} is {name!r}, which timm does not know; {nearest(name, known)}")
    size = config.model.kwargs.get("img_size", config.data.image_size)
    if size != config.data.image_size:
        raise ValueError(f"model.kwargs has img_size {size} but data.image_size is {config.data.image_size}")
    taken = {"num_classes", "drop_path_rate", "pretrained", "pretrained_cfg_overlay"} & set(config.model.kwargs)
    if taken:
        raise ValueError(f"model.kwargs holds {sorted(taken)}, which other keys of model set")


def check_class_names(
    of_training: str, trained: Sequence[str] | None, held_out: str, measured: Sequence[str] | None
) -> None:
    """Refuses held-out data that calls the classes otherwise than the training data, where both have names.

    Raises:
        ValueError: one sentence with what the two are, and the first names that differ.
    """
    if trained and measured and list(trained) != list(measured):
        first = next((a, b) for a, b in zip(trained, measured) if a != b)
        raise ValueError(
            f"the classes of {of_training} and of {held_out} differ, first {first[0]!r} and {first[1]!r}: training and "
            "held-out data need the same"
        )


def changed_keys(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Keys, other than those free to change, that keep a run from going on under another configuration."""
    old, new = flatten(old), flatten(new)
    return [key for key in FIELDS if key not in FREE_ON_RESUME and old.get(key, math.nan) != new[key]]
