"""The model and all that an update touches: precision, loss, gradient over the processes, optimizer, schedule, average.

What the batches are and when an update is made is left to train.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from timm.utils import ModelEmaV3
from torch import nn

from . import build
from .config import Config
from .distributed import Ranks
from .progress import seed_all

Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]


class Learner:
    """A model on its way from random weights to trained ones.

    Args:
        config: the run.
        num_classes: of the data.
        device: where the batches are.

    Attributes:
        model: the model itself, whose weights count where there is no average.
        ema: the average of its weights, or None.

    Raises:
        ValueError: the model, or an option of it, does not suit the data.
    """

    def __init__(self, config: Config, num_classes: int, device: torch.device) -> None:
        self.config, self.num_classes, self.device = config, num_classes, device
        self.amp = build.autocast(config.run.amp, device)
        seed_all(config.run.seed)
        self.model = build.build_model(config, num_classes).to(device)
        build.check_model(config, self.model, num_classes, device)
        self.ema = ModelEmaV3(self.model, config.ema.decay, use_warmup=config.ema.warmup) if config.ema.decay else None
        self.mixup = build.build_mixup(config, num_classes)
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.run.amp == "fp16")

    def start(self, ranks: Ranks, updates_per_epoch: int) -> None:
        """Makes optimizer and schedule for the global batch, and lets the gradient be averaged over the processes."""
        self.world_size = ranks.world_size
        images = self.config.data.batch_size * self.config.optimizer.accumulate * ranks.world_size
        scaled = build.scale_rates(self.config, images)
        self.optimizer = build.build_optimizer(scaled, self.model)
        self.scheduler = build.build_scheduler(scaled, self.optimizer, updates_per_epoch)
        self.averaging = ranks.wrap(self.model, self.device)
        compiled = build.compiles(self.config, self.device)
        self.forward = torch.compile(self.averaging) if compiled else self.averaging
        if ranks.world_size > 1:
            self.settle()

    def settle(self) -> None:
        """Makes one gradient in vain.

        DistributedDataParallel sorts gradients into its buckets by the order in which the first ones came. Only with
        that behind it are sums over more than two processes rounded the same in a run that goes on as in one that was
        never interrupted.
        """
        size = self.config.data.image_size
        self.averaging.eval()  # leaves the statistics of batch norms alone
        self.averaging(torch.zeros(2, 3, size, size, device=self.device)).float().sum().backward()
        self.model.zero_grad()

    @property
    def weights(self) -> str:
        """Which weights count: "ema" where there is an average, or else "model"."""
        return "ema" if self.ema else "model"

    @property
    def description(self) -> dict[str, Any]:
        """What it takes to make the model again, and which weights of it count."""
        kwargs = build.model_kwargs(self.config, self.num_classes)
        return {"model": self.config.model.name, "kwargs": kwargs, "weights": self.weights}

    @property
    def models(self) -> dict[str, nn.Module]:
        """What is measured: the model and, where there is one, its average."""
        return {"model": self.model, **({"ema": self.ema.module} if self.ema else {})}

    @property
    def rate(self) -> float:
        """The learning rate of the last update."""
        return max(group["lr"] for group in self.optimizer.param_groups)  # layer decay gives layers smaller ones

    def mixed(
        self, batch: tuple[torch.Tensor, torch.Tensor], place: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A batch as the model sees it; seeds every generator by its place (seed, epoch, batch) in the run."""
        seed_all(*place)
        return self.mixup(*batch) if self.mixup else batch

    def inputs(self, loader: Any, places: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """The images and targets of the batches at some places of this process, drawn and mixed again."""
        (_, epoch, first), ranks = places[0], self.world_size
        with closing(loader.epoch(epoch, start=first // ranks)) as stream:
            mixed = [self.mixed(batch, place) for batch, place in zip(stream, places)]
        return torch.cat([images for images, _ in mixed]), torch.cat([targets for _, targets in mixed])

    def gradient(self, stream: Batches, places: Sequence[Sequence[int]]) -> tuple[float, float]:
        """Computes the gradient of the mean loss over the next batches of every process.

        Args:
            stream: batches of images (B, 3, H, W) and targets (B,).
            places: for each batch to take, the numbers that its randomness comes from.

        Returns:
            The mean loss of this process, and the norm of the gradient, the same in all, before it was clipped.
        """
        smoothing = 0.0 if self.mixup else self.config.augmentation.label_smoothing  # Mixup smooths its own targets
        losses = []
        for i, place in enumerate(places, 1):
            images, targets = self.mixed(next(stream), place)
            waits = i < len(places) and self.averaging is not self.model
            with self.averaging.no_sync() if waits else nullcontext():
                with self.amp:
                    logits = self.forward(images)
                losses.append(F.cross_entropy(logits.float(), targets, label_smoothing=smoothing))
                self.scaler.scale(losses[-1] / len(places)).backward()
        self.scaler.unscale_(self.optimizer)
        total = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.clip_grad or math.inf)
        # One transfer, which waits for the device, tells both whether to step and what to log.
        loss, norm = torch.stack([torch.stack(losses).mean().detach(), total]).tolist()
        return loss, norm

    def step(self, update: int, skip: bool) -> None:
        """Follows the gradient, or throws it away.

        Args:
            update: number of this update, from 1.
            skip: leave weights, their average and the optimizer as they are.
        """
        if not skip:
            self.scaler.step(self.optimizer)
            if self.ema:
                self.ema.update(self.model, step=update)
        self.scaler.update()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        """All that the next update depends on, besides its batch and its place."""
        return {
            "model": self.model.state_dict(),
            "ema": self.ema.module.state_dict() if self.ema else None,
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Takes over what `state` gave; raises whatever torch raises of a state that does not fit."""
        self.model.load_state_dict(state["model"])
        if self.ema:
            self.ema.module.load_state_dict(state["ema"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
