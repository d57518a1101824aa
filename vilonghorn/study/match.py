"""Contenders of a study made equal in parameters to its reference, by one keyword that moves."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import timm
import torch
import yaml

from .plan import Study

TOLERANCE = 0.03  # by how much the parameters of contenders may differ from those of the reference


def check_sizes(study: Study) -> None:
    """Refuses contenders that cannot be made or matched on one of their tasks.

    Raises:
        ValueError: see `matched`.
    """
    for task in study.tasks:
        for contender in study.names(task):
            matched(study, task, contender)


def matched(study: Study, task: str, contender: str) -> tuple[dict[str, Any], int]:
    """The keywords of a contender on a task, sized to the reference, and the number of its parameters.

    Raises:
        ValueError: the model cannot be made, or no value brings its parameters within 3% of the reference's.
    """

    def keywords(name: str, **more: Any) -> dict[str, Any]:
        return {**study.trunk, **study.tasks[task].kwargs, **study.contenders[name].kwargs, **more}

    dataset, plan = study.tasks[task].dataset("train"), study.contenders[contender]
    head = dict(num_classes=len(dataset.classes), img_size=dataset.side)
    target = parameters(study.contenders[study.reference].model, keywords(study.reference), head)
    if contender == study.reference:
        return keywords(contender), target
    choices = [{}]
    for keyword, (low, high, step) in plan.match.items():
        count = math.floor((high - low) / step + 1e-9) + 1
        values = [low + i * step for i in range(count)]
        choices = [{keyword: int(value) if value == int(value) else value} for value in values]
    sizes = [(parameters(plan.model, keywords(contender, **choice), head), choice) for choice in choices]
    size, choice = min(sizes, key=lambda pair: abs(pair[0] - target))
    if abs(size / target - 1) > TOLERANCE:
        raise ValueError(
            f"{contender} has {size:,} parameters on task {task}, {size / target - 1:+.1%} against {study.reference}, and at "
            f"most {TOLERANCE:.0%} is allowed: give it a keyword to match, such as match: {{embed_dim: [56, 72, 1]}}"
        )
    return keywords(contender, **choice), size


def parameters(model: str, kwargs: dict[str, Any], head: dict[str, Any]) -> int:
    """Parameters of a timm model."""
    return _parameters(model, yaml.safe_dump({**kwargs, **head}))


@lru_cache(maxsize=None)
def _parameters(model: str, kwargs: str) -> int:
    try:
        with torch.device("meta"):  # counted, not filled
            return sum(p.numel() for p in timm.create_model(model, **yaml.safe_load(kwargs)).parameters())
    except (TypeError, RuntimeError, AssertionError, ZeroDivisionError) as error:
        raise ValueError(f"timm cannot make {model} with {yaml.safe_load(kwargs)}: {error}") from error
