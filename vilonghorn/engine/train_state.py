"""The training state: model, optimizer, schedule, average and progress, and the steps of an update."""

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from timm.layers import to_2tuple
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from timm.utils import ModelEmaV3, random_seed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .captured_update import CapturedUpdate, why_not_captured
from .config import ClassNames, Config
from .device import autocast
from .distributed import Distributed
from .model_setup import explain_model_errors
from .tasks import build_task

Batch = tuple[torch.Tensor, torch.Tensor]  # images (B, 3, H, W) and targets (B,), or (B, classes) after mixup


@dataclass
class Progress:
    """The position of a run. It is saved with the tensors of `TrainState`."""

    epoch: int = 0  # finished epochs, evaluation included
    batch: int = 0  # finished batches of the current epoch, over all processes
    losses: list[float] = field(default_factory=list)  # of the updates of this epoch; nan: skipped
    skipped: int = 0  # skipped updates
    skipped_in_row: int = 0
    results: dict[str, dict[str, float]] = field(default_factory=dict)  # last evaluation of "model" and "ema"
    best: dict[str, float] = field(default_factory=dict)  # best epoch, its top1, if any, and loss
    seconds: float = 0.0  # of training and evaluation
    log_size: int = 0  # bytes of the log up to here


class StepCounter:
    """Counts the batches of all processes and the updates of an epoch. In a round every process takes one batch."""

    def __init__(self, rounds: int, accumulate: int, world_size: int) -> None:
        self.rounds, self.accumulate, self.world_size = rounds, accumulate, world_size  # the last update may take fewer
        self.batches, self.batches_per_update = rounds * world_size, accumulate * world_size
        self.updates_per_epoch = math.ceil(rounds / accumulate)

    def update(self, progress: Progress) -> int:
        """Number of updates so far, skipped ones included."""
        return progress.epoch * self.updates_per_epoch + math.ceil(progress.batch / self.batches_per_update)

    def next_batches(self, progress: Progress) -> range:
        """Numbers of the batches of the next update, over all processes."""
        return range(progress.batch, min(progress.batch + self.batches_per_update, self.batches))


def seed_all(*numbers: int) -> None:
    """Seeds all global generators, before each batch with (seed, epoch, batch), so that a resumed run is the same."""
    random_seed(int(np.random.SeedSequence(numbers).generate_state(1)[0]))


def scale_rates(config: Config, images: int) -> Config:
    """Scales the learning rates in proportion to the images per update (Goyal et al., 2017, arXiv 1706.02677)."""
    optimizer, schedule = config.optimizer, config.schedule
    factor = images / optimizer.lr_batch if optimizer.lr_batch else 1.0
    rates = replace(schedule, warmup_lr=schedule.warmup_lr * factor, min_lr=schedule.min_lr * factor)
    return replace(config, optimizer=replace(optimizer, lr=optimizer.lr * factor), schedule=rates)


def build_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer, without weight decay on vectors and on the model's `no_weight_decay()`; AdamW is fused on GPUs."""
    name = config.optimizer.name
    keys = ("lr", "weight_decay", "betas", "eps", "layer_decay", "layer_decay_min_scale")
    own = {key: getattr(config.optimizer, key) for key in keys}
    if name == "adamw" and next(model.parameters()).is_cuda:
        own["fused"] = True
    own |= config.optimizer.kwargs
    given = f" with {config.optimizer.kwargs}" if config.optimizer.kwargs else ""
    with explain_model_errors(f"optimizer.name is {name!r}, which timm cannot make{given}"):
        optimizer = create_optimizer_v2(model, name, **own)
    if getattr(optimizer, "is_second_order", False):
        raise ValueError(f"optimizer.name is {name!r}, which needs second derivatives: choose another")
    return optimizer


def build_scheduler(config: Config, optimizer: torch.optim.Optimizer, updates_per_epoch: int) -> Scheduler:
    """The schedule; `step_update(n)` sets the rate of update n, from 0."""
    schedule = config.schedule
    options = {"num_epochs": schedule.epochs, "warmup_epochs": schedule.warmup, "updates_per_epoch": updates_per_epoch}
    options |= {"warmup_lr": schedule.warmup_lr, "min_lr": schedule.min_lr}
    return create_scheduler_v2(optimizer, schedule.kind, step_on_epochs=False, **options)[0]


class TrainState:
    """A model in training, and what belongs to it.

    `model` is without DistributedDataParallel or compilation; `ema` is the moving average of its weights, or None;
    `trained` is the model, or what the task trains around it. `models` are those to evaluate; `reported` is the name of
    the one that gives the results.
    """

    def __init__(self, config: Config, num_classes: int, device: torch.device, class_names: ClassNames = None) -> None:
        self.config, self.device = config, device
        self.num_classes = num_classes if config.task.labelled else 0
        self.amp = autocast(config.run.amp, device)
        seed_all(config.run.seed)
        self.model, self.task = build_task(config, num_classes, device, class_names)
        self.ema = ModelEmaV3(self.model, config.ema.decay, use_warmup=config.ema.warmup) if config.ema.decay else None
        self.models = {"model": self.model, **({"ema": self.ema.module} if self.ema else {})}
        self.reported = "ema" if self.ema else "model"
        self.trained = self.task.wrap(self.model)
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.run.amp == "fp16")

    def setup(self, dist: Distributed, updates_per_epoch: int) -> None:
        """Builds optimizer and schedule for the global batch, and wraps the model for several processes."""
        self.dist, images = dist, self.config.data.batch_size * self.config.optimizer.accumulate * dist.world_size
        scaled = scale_rates(self.config, images)
        self.optimizer = build_optimizer(scaled, self.trained)
        self.scheduler = build_scheduler(scaled, self.optimizer, updates_per_epoch)
        extra = {"extra": self.task.extra} if self.task.extra else {}
        self._parts = {**self.models, **extra, "optimizer": self.optimizer, "scaler": self.scaler}
        self.wrapped, on_gpu = self.trained, self.device.type == "cuda"
        # A fused optimizer decides on the device, so that nothing waits for it; any other on the CPU.
        self.is_fused = all(group.get("fused") for group in self.optimizer.param_groups)
        self.captured = None
        if self.config.run.capture:
            is_capturable = self.is_fused and all("capturable" in group for group in self.optimizer.param_groups)
            if why := why_not_captured(self.config, self.device, dist.world_size, is_capturable):
                raise ValueError(f"run.capture is true, but {why}")
            self.captured = CapturedUpdate(self._update, self.optimizer)
        if dist.world_size > 1:
            ids = [self.device.index] if on_gpu else None
            self.wrapped = DistributedDataParallel(self.trained, device_ids=ids, gradient_as_bucket_view=True)
            # A throwaway backward that fixes DDP's bucket order, for bitwise resume: DDP sorts its buckets by the order
            # of the first gradients, and sums over more than two processes are rounded differently in other buckets.
            size = to_2tuple(self.config.data.image_size)
            self.wrapped.eval()  # keeps batch norm statistics unchanged
            self.wrapped(torch.zeros(2, 3, *size, device=self.device)).float().sum().backward()
            self.trained.zero_grad()
        run, self.forward = self.config.run, self.wrapped
        if compiled := on_gpu if run.compile is None else run.compile:
            torch._functorch.config.activation_memory_budget = run.memory_budget
            self.forward = torch.compile(self.wrapped, mode=compiled if isinstance(compiled, str) else None)
        elif run.memory_budget < 1:
            problem = f"run.memory_budget is {run.memory_budget}, but the model is not compiled"
            raise ValueError(f"{problem}: set run.compile")

    def backward(self, stream: Iterator[Batch], positions: Sequence[Sequence[int]]) -> torch.Tensor:
        """Computes and clips the gradient of the mean loss over the batches of all processes.

        `positions` are (seed, epoch, batch) of the batches of this process. Returns, on the device, the mean loss of
        this process and the norm of the global gradient before clipping, (2,), in float64.
        """
        losses = []
        for i, position in enumerate(positions, 1):
            images, targets = next(stream)
            seed_all(*position)
            batch = self.task.augment(images, targets)
            accumulates = i < len(positions) and self.wrapped is not self.trained
            with self.wrapped.no_sync() if accumulates else nullcontext():
                losses.append(self.task.loss(self.forward, *batch, self.amp))
                self.scaler.scale(losses[-1] / len(positions)).backward()
        self.scaler.unscale_(self.optimizer)
        return self._clip(torch.stack(losses).mean().detach())

    def update(self, stream: Iterator[Batch], positions: Sequence[Sequence[int]], number: int) -> torch.Tensor:
        """Makes update `number`, from 1, of the batches at `positions`, as `backward`; skips it if it is not finite.

        Returns the mean loss over all processes and the norm of the gradient, as `backward`.
        """
        if self.captured:
            images, targets = next(stream)
            seed_all(*positions[0])
            measured = self.captured(*self.task.augment(images, targets)).clone()
        else:
            measured = self.dist.average(self.backward(stream, positions))
            self._apply(measured)
        if self.ema:  # also takes the weights of an update that was skipped
            self.ema.update(self.model, step=number)
        return measured

    def _update(self, images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """An update of one batch in one process, without a wait for the device."""
        loss = self.task.loss(self.forward, images, targets, self.amp)
        loss.backward()
        measured = self._clip(loss.detach())
        self._apply(measured)
        return measured

    def _clip(self, loss: torch.Tensor) -> torch.Tensor:
        """Clips the gradient; returns the loss and the norm before, (2,), in float64."""
        total = nn.utils.clip_grad_norm_(self.trained.parameters(), self.config.optimizer.clip_grad or math.inf)
        return torch.stack([loss, total]).double()

    def _apply(self, measured: torch.Tensor) -> None:
        """Applies the gradient if `measured`, its loss and norm, is finite."""
        finite = measured.isfinite().all()
        if self.is_fused and not self.scaler.is_enabled():
            self.optimizer.grad_scale, self.optimizer.found_inf = None, (~finite).float()  # type: ignore[attr-defined]
            self.optimizer.step()
        elif finite:
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """The tensors and numbers that the next update depends on."""
        return {"ema": None, **{name: part.state_dict() for name, part in self._parts.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads the result of `state_dict`. Raises torch's errors if it does not fit."""
        for name, part in self._parts.items():
            part.load_state_dict(state[name])
