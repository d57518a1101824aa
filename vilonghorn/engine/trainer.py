"""The training loop. A run can be stopped at any moment, and resumes to the same result."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, replace
from typing import Any, Literal

from .build import build_loader, check_classes, model_kwargs, one_line, pick_device
from .checkpoint import RunDirectory, save_weights
from .config import Config, changed_keys, check
from .distributed import Distributed, Interrupted, StopRequest
from .evaluate import evaluate
from .logging import RunLogger, mean_loss
from .report import describe_environment, write_report
from .train_state import Batch, Progress, StepCounter, TrainState

Resume = bool | Literal["auto"]


class Trainer:
    """A training run: started, or resumed from its last checkpoint.

    Args:
        config: the run.
        train: loader of the training data; None: made from the configuration.
        val: loader of the held-out data; None: made from the configuration.
        resume: resume from the last checkpoint in `config.run.dir`; "auto": if there is one, else start.
        overwrite: replace a run in `config.run.dir`.

    Raises:
        ValueError: the configuration, the data, or the checkpoint to resume from does not fit.
        FileExistsError: `config.run.dir` holds a run, or a file that a run would overwrite.
        BlockingIOError: another process is training there.
        FileNotFoundError: there is no checkpoint to resume from, or no data.
        PeerFailed: another process of this run failed for one of these reasons, or died.
        Interrupted: SIGINT, SIGTERM or SIGUSR1 came during the first checkpoint; the run is saved.
    """

    def __init__(
        self, config: Config, train: Any = None, val: Any = None, *, resume: Resume = False, overwrite: bool = False
    ) -> None:
        check(config)
        self.config, self.progress, self.dist = config, Progress(), Distributed()
        self.directory = RunDirectory(config.run.dir)
        self.dist.init()
        state = self.dist.run_on_all(lambda: self._setup(train, val, resume, overwrite))
        with self.dist.peer_errors():
            self.train_state.setup(self.dist, self.steps.updates_per_epoch)
        self.clock = self.saved = time.monotonic()
        with StopRequest(self.dist) as stop:
            self.dist.run_on_all(lambda: self._open(state))
            if not state:
                self.save()
            try:
                stop.check()
            except Interrupted as interrupted:
                raise self._explain(interrupted) from None

    def _setup(self, train: Any, val: Any, resume: Resume, overwrite: bool) -> dict[str, Any] | None:
        """Makes and checks the parts of the run without writing anything; returns the state to resume from."""
        config, directory, dist = self.config, self.directory, self.dist
        if resume == "auto":
            resume = directory.has_state
            if not resume:
                directory.check_is_free(allow_started=True)
        elif not (resume or overwrite):
            directory.check_is_free()
        if resume and dist.is_main and directory.has_state:
            directory.lock()
        state = directory.load_state() if resume else None
        if state and (changed := changed_keys(state["config"], config.to_dict())):
            raise ValueError(f"{config.run.dir} was started with another {', '.join(changed)}: resume with what it had")
        device = pick_device(config.run.device, dist)
        train = build_loader(config, device, training=True, dist=dist) if train is None else train
        val = build_loader(config, device, training=False, dist=dist) if val is None else val
        check_classes(config.data.train, train.num_classes, train.class_names, config.data.val, val)
        self.train_loader, self.val_loader = train, val
        self.steps = StepCounter(len(train), config.optimizer.accumulate, dist.world_size)
        self.data = {
            "images": train.num_samples,
            "batches": self.steps.batches,
            "batches_per_update": self.steps.batches_per_update,
            "classes": train.num_classes,
            "train": train.fingerprint,
            "val": val.fingerprint,
        }
        if state:
            check_data(config, state["data"], self.data)
            config = replace(config, model=replace(config.model, weights=None, pretrained=False))  # state has weights
        self.train_state = TrainState(config, train.num_classes, device)
        return state

    def _open(self, state: dict[str, Any] | None) -> None:
        """Loads the state, if any, and prepares the directory and the logs."""
        if state:
            try:
                self.train_state.load_state_dict(state)
                self.progress = Progress(**state["progress"])
            except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
                file, reason = self.directory.state, one_line(error)
                raise ValueError(f"{file} is not the state of this run ({reason}): start a new run") from error
        if self.dist.is_main:
            environment = {**describe_environment(self.train_state.device), "processes": self.dist.world_size}
            self.directory.open(self.config.to_dict(), environment, self.progress.log_size if state else None)
        self.logger = RunLogger(self.config, self.directory, self.steps, self.update, enabled=self.dist.is_main)

    @property
    def update(self) -> int:
        """Number of updates so far, skipped ones included."""
        return self.steps.update(self.progress)

    def fit(self) -> dict[str, Any]:
        """Trains and evaluates to the last epoch.

        Returns:
            Results of the final weights: `top1`, `top5`, `loss`, and `weights`, "model" or "ema"; `epochs`; `images`
            evaluated; `best`, epoch and top1 of the best epoch; `skipped` updates; `seconds`.

        Raises:
            Interrupted: SIGINT, SIGTERM or SIGUSR1 came; the run is saved.
            FloatingPointError: too many updates in a row were not finite.
            PeerFailed: another process of the run died.
        """
        progress = self.progress
        self.clock = time.monotonic()
        with StopRequest(self.dist) as stop, self.dist.peer_errors():
            try:
                while progress.epoch < self.config.schedule.epochs:
                    self.train_epoch(stop)
                    self.evaluate_epoch(stop)
            except Interrupted as interrupted:
                self.save()
                self.logger.draw_curves()
                raise self._explain(interrupted) from None
            finally:
                self.logger.close()
        self.logger.draw_curves()
        weights, images = self.train_state.weights, self.val_loader.num_samples
        result = {**progress.results[weights], "weights": weights, "epochs": progress.epoch, "images": images}
        result |= {"best": progress.best, "skipped": progress.skipped, "seconds": progress.seconds}
        write_report(self.directory, self.config, self.train_state, self.val_loader, self.dist, result)
        return result

    def train_epoch(self, stop: StopRequest) -> None:
        """Makes the remaining updates of this epoch."""
        progress, steps = self.progress, self.steps
        self.train_state.model.train()
        with closing(self.train_loader.epoch(progress.epoch, start=progress.batch // steps.world_size)) as stream:
            with self.logger.epoch(stream, progress) as timed:
                while batches := steps.next_batches(progress):
                    loss, norm = self.make_update(timed, batches)
                    self._count_time()
                    self.logger.log_update(progress, loss, norm, self.train_state.lr, len(batches))
                    if self.checkpoint_is_due():
                        self.save()
                    stop.check()

    def make_update(self, stream: Iterator[Batch], batches: range) -> tuple[float, float]:
        """Makes one update, or skips it if the loss or its gradient is not finite.

        `stream` has the batches of this process, `batches` the numbers in the epoch of those to take, over all
        processes. Returns the loss and the norm of its gradient, over all processes.
        """
        progress, dist, state = self.progress, self.dist, self.train_state
        state.scheduler.step_update(self.update)
        positions = [(self.config.run.seed, progress.epoch, batch) for batch in batches[dist.rank :: dist.world_size]]
        own_loss, norm = state.backward(stream, positions)
        loss = dist.sum([own_loss])[0] / dist.world_size
        progress.batch = batches.stop
        skip = not (math.isfinite(loss) and math.isfinite(norm))
        state.step(self.update, skip)
        progress.losses.append(math.nan if skip else loss)
        progress.skipped += skip
        progress.skipped_in_row = progress.skipped_in_row + 1 if skip else 0
        if progress.skipped_in_row > self.config.run.max_skipped:
            images, targets = state.read_again(self.train_loader, positions)
            file = self.directory.path / f"nonfinite-{dist.rank}.safetensors"
            file.parent.mkdir(parents=True, exist_ok=True)  # on the other machines
            save_weights(file, {"images": images, "targets": targets}, {"loss": str(own_loss)})
            raise FloatingPointError(
                f"{progress.skipped_in_row} updates in a row, up to batch {progress.batch} of epoch "
                f"{progress.epoch + 1}, had a loss or gradient that is not finite: lower optimizer.lr, or set run.amp "
                f"to off; the last batch is in {file}"
            )
        return loss, norm

    def checkpoint_is_due(self) -> bool:
        """Whether to save inside the epoch, by the number of updates or by the clock of process 0."""
        run = self.config.run
        if run.checkpoint_updates and self.update % run.checkpoint_updates == 0:
            return True
        if not run.checkpoint_seconds:
            return False
        late = time.monotonic() - self.saved > run.checkpoint_seconds
        return self.dist.sum([float(self.dist.is_main and late)])[0] > 0

    def evaluate_epoch(self, stop: StopRequest) -> None:
        """Ends an epoch: evaluates the model and its average, and saves log, weights and state."""
        progress, state = self.progress, self.train_state
        for model in state.models.values():
            self.dist.broadcast_buffers(model)
        progress.results = evaluate(state.models, self.val_loader, amp=state.amp, on_batch=stop.check, dist=self.dist)
        self._count_time()
        train_loss, result = mean_loss(progress.losses), progress.results[state.weights]
        self.logger.write("epoch", progress, train_loss=train_loss, **progress.results)
        progress.epoch, progress.batch, progress.losses = progress.epoch + 1, 0, []
        is_best = not progress.best or result["top1"] > progress.best["top1"]
        if is_best:
            progress.best = {"epoch": progress.epoch, "top1": result["top1"]}
        self.dist.run_on_all(lambda: self._save_weights(["best", "last"] if is_best else ["last"]))
        self.save()
        self.logger.log_epoch(progress, train_loss)

    def save(self) -> None:
        """Saves the full state."""

        def write() -> None:
            if self.dist.is_main:
                self.progress.log_size = self.directory.log.sync()
                parts = {"config": self.config.to_dict(), "data": self.data, "progress": asdict(self.progress)}
                self.directory.save_state({**parts, **self.train_state.state_dict()})

        self.dist.run_on_all(write)
        self.saved = time.monotonic()

    def _save_weights(self, checkpoints: list[str]) -> None:
        """Saves the weights that give the results as the "best" or the "last"."""
        if self.dist.is_main:
            state = self.train_state
            record = {
                "model": self.config.model.name,
                "kwargs": model_kwargs(self.config, state.num_classes),
                "weights": state.weights,
                "class_names": self.train_loader.class_names,
                "epoch": self.progress.epoch,
                **self.progress.results[state.weights],
            }
            for checkpoint in checkpoints:
                save_weights(self.directory.weights(checkpoint), state.models[state.weights].state_dict(), record)

    def _explain(self, interrupted: Interrupted) -> Interrupted:
        """The same interruption, with the position of the saved run and the command to resume it."""
        where = f"in epoch {self.progress.epoch + 1}, after {self.progress.batch} of {self.steps.batches} batches"
        how = f"python train_imagenet.py --resume {self.directory.path}"
        return Interrupted(interrupted.signum, f"{interrupted} {where}; go on with: {how}")

    def _count_time(self) -> None:
        """Adds the time since the last call to the run's."""
        now = time.monotonic()
        self.progress.seconds += now - self.clock
        self.clock = now


def check_data(config: Config, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Raises ValueError if a resumed run does not have the same data, or not the same batches per update."""
    train, val, same = config.data.train, config.data.val, "resume with the same data"
    for key, source, what, advice in (
        ("batches_per_update", "this job", "batches per update", "change optimizer.accumulate or the processes"),
        ("images", train, "images", same),
        ("classes", train, "classes", same),
        ("batches", train, "batches per epoch", "resume with as many processes as it had"),
        ("train", train, "as fingerprint", same),
        ("val", val, "as fingerprint", same),
    ):
        if old[key] != new[key]:
            raise ValueError(f"{source} has {new[key]} {what} but the run was started with {old[key]}: {advice}")
