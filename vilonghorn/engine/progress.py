"""Where a run is, and the randomness and the means that follow from it: pure values, which any checkpoint can hold."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import numpy as np
import torch


@dataclass
class Progress:
    """Where a run is; with the weights, their average and the optimizer's state, all that it goes on from."""

    epoch: int = 0  # epochs finished, evaluation included
    batch: int = 0  # batches finished of the next one
    losses: list[float] = field(default_factory=list)  # of the updates of this epoch; nan: skipped
    skipped: int = 0
    skipped_in_row: int = 0
    results: dict[str, dict[str, float]] = field(default_factory=dict)  # last evaluation of "model" and "ema"
    best: dict[str, float] = field(default_factory=dict)  # best epoch and its top1
    seconds: float = 0.0  # spent training and evaluating
    log_size: int = 0  # bytes of the log that belong to this state


def seed_all(*numbers: int) -> None:
    """Seeds every global generator from a tuple of numbers.

    Done before each batch from (seed, epoch, batch): mixing and drop path then depend on the position alone, so that a
    resumed run draws what the uninterrupted one would have, whatever loaders and evaluations drew in between.
    """
    seed = int(np.random.SeedSequence(numbers).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def mean_loss(losses: list[float]) -> float | None:
    """The mean of the losses that are numbers; None if none is."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    return sum(finite) / len(finite) if finite else None
