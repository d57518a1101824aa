"""Where a run is, how its epochs divide into updates, and the randomness and the means that follow from that."""

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
    batch: int = 0  # batches finished of the next one, of all processes
    losses: list[float] = field(default_factory=list)  # of the updates of this epoch; nan: skipped
    skipped: int = 0
    skipped_in_row: int = 0
    results: dict[str, dict[str, float]] = field(default_factory=dict)  # last evaluation of "model" and "ema"
    best: dict[str, float] = field(default_factory=dict)  # best epoch and its top1
    seconds: float = 0.0  # spent training and evaluating
    log_size: int = 0  # bytes of the log that belong to this state


@dataclass(frozen=True)
class Pace:
    """How an epoch divides into updates: in each round every process takes a batch, and an update takes some rounds.

    Args:
        rounds: batches of an epoch, of one process.
        accumulate: rounds of an update; the last update of an epoch takes those that are left.
        world_size: processes.
    """

    rounds: int
    accumulate: int
    world_size: int

    @property
    def batches(self) -> int:
        """Batches of an epoch, of all processes."""
        return self.rounds * self.world_size

    @property
    def batches_per_update(self) -> int:
        """Batches of an update, of all processes."""
        return self.accumulate * self.world_size

    @property
    def updates_per_epoch(self) -> int:
        """Updates of an epoch."""
        return math.ceil(self.rounds / self.accumulate)

    def update(self, progress: Progress) -> int:
        """Updates made or skipped so far, which the schedule follows."""
        return progress.epoch * self.updates_per_epoch + math.ceil(progress.batch / self.batches_per_update)

    def next_batches(self, progress: Progress) -> range:
        """The batches of the next update, numbered in its epoch; each process takes one, in turn."""
        return range(progress.batch, min(progress.batch + self.batches_per_update, self.batches))


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
