"""The optimizer and the learning rate schedule of a run, scaled to its batches."""

from dataclasses import replace

import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from torch import nn

from .config import Config
from .model_setup import explain_model_errors


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
