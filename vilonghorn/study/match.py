"""Gives the candidates of a study the number of parameters of its reference."""

from functools import cache
from typing import Any

import numpy as np
import timm
import torch
import yaml

from .. import models  # noqa: F401  (registers them with timm)
from .plan import Study

TOLERANCE = 0.03  # allowed relative difference in parameters


def match_size(study: Study, task: str, candidate: str) -> tuple[dict[str, Any], int]:
    """The arguments of a candidate on a task, and its number of parameters (0 for a candidate that is `removed`).

    Raises:
        ValueError: timm cannot make the model, or no value of `match` brings it within 3% of the reference.
    """
    dataset = study.tasks[task].dataset("train")

    def kwargs(name: str, **more: Any) -> dict[str, Any]:
        return {**study.trunk, **study.tasks[task].kwargs, **study.candidates[name].kwargs, **more}

    def count(name: str, **more: Any) -> int:
        head = dict(num_classes=dataset.num_classes, img_size=dataset.side)
        return _num_parameters(study.candidates[name].model, yaml.safe_dump({**kwargs(name, **more), **head}))

    if study.candidates[candidate].removed:
        return kwargs(candidate), 0
    target = count(study.reference)
    choices: list[dict[str, float]] = [{}]
    for name, (low, high, step) in study.candidates[candidate].match.items():
        values = np.arange(low, high + step / 2, step).tolist()
        choices = [{name: int(value) if value.is_integer() else value} for value in values]
    size, choice = min(((count(candidate, **c), c) for c in choices), key=lambda pair: abs(pair[0] - target))
    if abs(size / target - 1) > TOLERANCE:
        raise ValueError(
            f"{candidate} has {size:,} parameters on task {task}, {size / target - 1:+.1%} against {study.reference}, "
            f"and at most {TOLERANCE:.0%} is allowed: give it an argument to match, such as "
            "embed_dim: [56, 72, 1]"
        )
    return kwargs(candidate, **choice), size


@cache
def _num_parameters(model: str, kwargs: str) -> int:
    try:
        with torch.device("meta"):  # allocates nothing
            return sum(p.numel() for p in timm.create_model(model, **yaml.safe_load(kwargs)).parameters())
    except (TypeError, RuntimeError, AssertionError, ZeroDivisionError) as error:
        raise ValueError(f"timm cannot make {model} with {yaml.safe_load(kwargs)}: {error}") from error
