"""The training run: one loop, from a configuration to weights, that can be stopped at any moment and go on unchanged.

The parts come from build.py, the data from a loader; what reaches the disk goes through directory.py and report.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from timm.utils import ModelEmaV3
from tqdm import tqdm

from . import build, report
from .checks import changed_keys, check
from .config import Config
from .directory import RunDirectory
from .evaluate import evaluate
from .interrupt import Interrupted, StopRequest
from .progress import Progress, mean_loss, seed_all

SECONDS_BETWEEN_CURVES = 60


class Trainer:
    """A run: made, or taken up where its last checkpoint left it, and brought to its end by `fit`.

    Args:
        config: the run.
        train: loader of the training data; None: made from the configuration.
        val: loader of the held-out data; None: made from the configuration.
        resume: go on from `last.pt` in `config.run.dir`.
        overwrite: start anew even where a run is.

    Raises:
        ValueError: the configuration, the data, or the checkpoint to resume does not fit.
        FileExistsError: there is a run, or a file that a run would write over, in `config.run.dir`.
        BlockingIOError: another process is training there.
        FileNotFoundError: there is none to resume, or no data.
        Interrupted: SIGINT or SIGTERM came while the run was first saved; it is saved.
    """

    def __init__(
        self, config: Config, train: Any = None, val: Any = None, *, resume: bool = False, overwrite: bool = False
    ) -> None:
        check(config)
        self.config = config
        self.directory = RunDirectory(config.run.dir)
        if not (resume or overwrite):
            self.directory.refuse_if_taken()
        if resume and self.directory.state.exists():
            self.directory.lock()
        state = self.directory.load() if resume else None
        if state and (changed := changed_keys(state["config"], config.to_dict())):
            raise ValueError(f"{config.run.dir} was started with another {', '.join(changed)}: resume with what it had")
        self.device = build.pick_device(config.run.device)
        self.amp = build.autocast(config.run.amp, self.device)
        self.train = build.train_loader(config, self.device) if train is None else train
        self.val = build.val_loader(config, self.device) if val is None else val
        self.check_classes()

        seed_all(config.run.seed)
        self.model = build.build_model(config, self.train.num_classes).to(self.device)
        build.check_model(config, self.model, self.train.num_classes, self.device)
        self.forward = torch.compile(self.model) if config.run.compile else self.model
        self.ema = ModelEmaV3(self.model, config.ema.decay, use_warmup=config.ema.warmup) if config.ema.decay else None
        self.optimizer = build.build_optimizer(config, self.model)
        self.updates_per_epoch = math.ceil(len(self.train) / config.optimizer.accumulate)
        self.scheduler = build.build_scheduler(config, self.optimizer, self.updates_per_epoch)
        self.mixup = build.build_mixup(config, self.train.num_classes)
        self.progress = self.restore(state) if state else Progress()

        environment = report.describe_environment(self.device)
        self.clock = self.saved = self.drawn = time.monotonic()
        with StopRequest() as stop:
            self.directory.open(config.to_dict(), environment, self.progress.log_size if state else None)
            if not state:
                self.save()
            try:
                stop.obey()
            except Interrupted as interrupted:
                raise self.resumable(interrupted) from None

    def check_classes(self) -> None:
        """Refuses held-out data whose labels mean something else."""
        data, train, val = self.config.data, self.train, self.val
        if train.num_classes != val.num_classes:
            raise ValueError(
                f"{data.train} has {train.num_classes} classes but {data.val} has {val.num_classes}: "
                "training and held-out data need the same"
            )
        if train.class_names and val.class_names and train.class_names != val.class_names:
            first = next((a, b) for a, b in zip(train.class_names, val.class_names) if a != b)
            raise ValueError(
                f"the classes of {data.train} and {data.val} differ, first {first[0]!r} and {first[1]!r}: training and "
                "held-out data need the same"
            )

    @property
    def update(self) -> int:
        """Updates made or skipped so far, which the schedule follows."""
        done = math.ceil(self.progress.batch / self.config.optimizer.accumulate)
        return self.progress.epoch * self.updates_per_epoch + done

    @property
    def weights(self) -> str:
        """Which weights count: "ema" where there is an average, or else "model"."""
        return "ema" if self.ema else "model"

    @property
    def data_shape(self) -> dict[str, int]:
        """What of the training data a resumed run has to find again."""
        return {"images": self.train.num_samples, "batches": len(self.train), "classes": self.train.num_classes}

    def restore(self, state: dict[str, Any]) -> Progress:
        """Takes over the tensors of a state; returns its progress."""
        if state["data"] != self.data_shape:
            raise ValueError(
                f"{self.config.data.train} has {self.data_shape} but the run was started with {state['data']}: resume "
                "with the same data"
            )
        try:
            self.model.load_state_dict(state["model"])
            if self.ema:
                self.ema.module.load_state_dict(state["ema"])
            self.optimizer.load_state_dict(state["optimizer"])
            return Progress(**state["progress"])
        except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"{self.directory.state} is not the state of this run, whose model and optimizer refuse it: "
                f"{' '.join(str(error).split())}"
            ) from error

    def save(self) -> None:
        """Saves all that the run goes on from."""
        self.progress.log_size = self.directory.log.sync()
        self.directory.save(
            {
                "config": self.config.to_dict(),
                "data": self.data_shape,
                "model": self.model.state_dict(),
                "ema": self.ema.module.state_dict() if self.ema else None,
                "optimizer": self.optimizer.state_dict(),
                "progress": asdict(self.progress),
            }
        )
        self.saved = time.monotonic()

    def resumable(self, interrupted: Interrupted) -> Interrupted:
        """The same interruption of the run, now saved, with where it was and how it goes on."""
        progress = self.progress
        where = f"in epoch {progress.epoch + 1}, after {progress.batch} of {len(self.train)} batches"
        how = f"python train_imagenet.py --resume {self.directory.path}"
        return Interrupted(interrupted.signum, f"{interrupted} {where}; go on with: {how}")

    def fit(self) -> dict[str, Any]:
        """Trains and evaluates to the last epoch.

        Returns:
            The results of the final weights, `top1`, `top5`, `loss`, and which they are, `weights`; `epochs`; `images`
            measured; `best`, epoch and top1 of the best epoch; `skipped` updates; `seconds`.

        Raises:
            Interrupted: SIGINT or SIGTERM came; the run is saved.
            FloatingPointError: too many updates in a row were not finite.
        """
        progress = self.progress
        self.clock = time.monotonic()
        with StopRequest() as stop:
            try:
                while progress.epoch < self.config.schedule.epochs:
                    self.train_epoch(stop)
                    self.measure_epoch(stop)
            except Interrupted as interrupted:
                self.save()
                self.draw_curves()
                raise self.resumable(interrupted) from None
        self.draw_curves()
        data, model = self.config.data, self.ema.module if self.ema else self.model
        report.draw_predictions(self.directory.predictions, model, self.val, self.amp, data.mean, data.std)
        return {
            **progress.results[self.weights],
            "weights": self.weights,
            "epochs": progress.epoch,
            "images": self.val.num_samples,
            "best": progress.best,
            "skipped": progress.skipped,
            "seconds": progress.seconds,
        }

    def train_epoch(self, stop: StopRequest) -> None:
        """Makes the updates that are left of this epoch."""
        config, progress, batches = self.config, self.progress, len(self.train)
        title = f"epoch {progress.epoch + 1}/{config.schedule.epochs}"
        bar = tqdm(total=batches, initial=progress.batch, desc=title, unit="batch", leave=False, disable=None)
        self.model.train()
        with bar, closing(self.train.epoch(progress.epoch, start=progress.batch)) as stream:
            while progress.batch < batches:
                count = min(config.optimizer.accumulate, batches - progress.batch)
                loss, norm = self.make_update(stream, count)
                self.log_update(norm)
                bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
                bar.update(count)
                if self.checkpoint_due():
                    self.save()
                stop.obey()

    def make_update(self, stream: Iterator[tuple[torch.Tensor, torch.Tensor]], count: int) -> tuple[float, float]:
        """One update from the next batches, skipped if the loss or its gradient is not finite.

        Args:
            stream: batches of images (B, 3, H, W) and targets (B,).
            count: batches whose gradients are averaged.

        Returns:
            The loss and the norm of its gradient.
        """
        config, progress = self.config, self.progress
        smoothing = 0.0 if self.mixup else config.augmentation.label_smoothing  # Mixup smooths its own targets
        self.scheduler.step_update(self.update)
        losses = []
        for i in range(count):
            images, targets = next(stream)
            seed_all(config.run.seed, progress.epoch, progress.batch + i)
            if self.mixup:
                images, targets = self.mixup(images, targets)
            with self.amp:
                logits = self.forward(images)
            losses.append(F.cross_entropy(logits.float(), targets, label_smoothing=smoothing))
            (losses[-1] / count).backward()
        total = torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.optimizer.clip_grad or math.inf)
        # One transfer, which waits for the device, tells both whether to step and what to log.
        loss, norm = torch.stack([torch.stack(losses).mean().detach(), total]).tolist()
        progress.batch += count
        finite = math.isfinite(loss) and math.isfinite(norm)
        if finite:
            self.optimizer.step()
            if self.ema:
                self.ema.update(self.model, step=self.update)
        self.optimizer.zero_grad()
        progress.losses.append(loss if finite else math.nan)
        progress.skipped += not finite
        progress.skipped_in_row = 0 if finite else progress.skipped_in_row + 1
        if progress.skipped_in_row > config.run.max_skipped:
            raise FloatingPointError(
                f"{progress.skipped_in_row} updates in a row, up to batch {progress.batch} of epoch "
                f"{progress.epoch + 1}, had a loss or gradient that is not finite: lower optimizer.lr, or set run.amp "
                "to off"
            )
        return loss, norm

    def log_update(self, norm: float) -> None:
        """Writes a line of the log every `run.log_updates` and at the end of the epoch."""
        progress, every = self.progress, self.config.run.log_updates
        self.tick()
        if len(progress.losses) % every == 0 or progress.batch == len(self.train):
            first = (len(progress.losses) - 1) // every * every
            self.directory.log.write(
                kind="train",
                epoch=progress.epoch + 1,
                update=self.update,
                loss=mean_loss(progress.losses[first:]),
                lr=self.optimizer.param_groups[0]["lr"],
                grad_norm=norm if math.isfinite(norm) else None,
                skipped=progress.skipped,
                seconds=round(progress.seconds, 3),
            )

    def checkpoint_due(self) -> bool:
        """Whether it is time for a checkpoint inside the epoch."""
        run = self.config.run
        return bool(run.checkpoint_updates and self.update % run.checkpoint_updates == 0) or bool(
            run.checkpoint_seconds and time.monotonic() - self.saved > run.checkpoint_seconds
        )

    def measure_epoch(self, stop: StopRequest) -> None:
        """Ends an epoch: measures the model and its average, and saves log, weights and state."""
        progress = self.progress
        models = {"model": self.model, **({"ema": self.ema.module} if self.ema else {})}
        progress.results = evaluate(models, self.val, amp=self.amp, on_batch=stop.obey)
        self.tick()
        train_loss = mean_loss(progress.losses)
        self.directory.log.write(
            kind="epoch",
            epoch=progress.epoch + 1,
            update=self.update,
            train_loss=train_loss,
            **progress.results,
            skipped=progress.skipped,
            seconds=round(progress.seconds, 3),
        )
        progress.epoch, progress.batch, progress.losses = progress.epoch + 1, 0, []

        result = progress.results[self.weights]
        record = {
            "model": self.config.model.name,
            "kwargs": build.model_kwargs(self.config, self.train.num_classes),
            "class_names": self.train.class_names,
            "weights": self.weights,
            "epoch": progress.epoch,
            **result,
        }
        if not progress.best or result["top1"] > progress.best["top1"]:
            progress.best = {"epoch": progress.epoch, "top1": result["top1"]}
            self.directory.save_weights("best", models[self.weights], record)
        self.directory.save_weights("last", models[self.weights], record)
        self.save()
        if time.monotonic() - self.drawn > SECONDS_BETWEEN_CURVES:
            self.draw_curves()
        title = f"epoch {progress.epoch}/{self.config.schedule.epochs}"
        loss = "not finite" if train_loss is None else f"{train_loss:.3f}"
        shown = ", ".join(f"{name} {values['top1']:.2f}%" for name, values in progress.results.items())
        print(f"{title}: training loss {loss}, held-out top-1 {shown}, {progress.seconds:.0f} s", flush=True)

    def draw_curves(self) -> None:
        """Draws what the log holds."""
        report.draw_curves(self.directory.curves, self.directory.log.records(), self.updates_per_epoch)
        self.drawn = time.monotonic()

    def tick(self) -> None:
        """Counts the time since the last tick as the run's."""
        now = time.monotonic()
        self.progress.seconds += now - self.clock
        self.clock = now
