"""The training run: one loop, from a configuration to weights, that can be stopped at any moment and go on unchanged.

An update is made by learner.py, in step with the other processes of ranks.py; the data come from loaders; what a run
shows goes through monitor.py, what it leaves through directory.py and report.py.
"""

from __future__ import annotations

import math
import time
from contextlib import closing
from dataclasses import asdict
from functools import partial
from typing import Any, Literal

from .begin import prepare
from .checks import check
from .config import Config
from .directory import RunDirectory
from .distributed import Ranks
from .evaluate import evaluate
from .interrupt import Interrupted, StopRequest
from .monitor import Monitor
from .page import leave_report
from .progress import Progress, mean_loss
from .report import describe_environment
from .train_state import Batches


class Trainer:
    """A run: made, or taken up where its last checkpoint left it, and brought to its end by `fit`.

    Args:
        config: the run.
        train: loader of the training data; None: made from the configuration.
        val: loader of the held-out data; None: made from the configuration.
        resume: go on from the last checkpoint in `config.run.dir`; "auto": if there is one, or else start.
        overwrite: start anew even where a run is.

    Raises:
        ValueError: the configuration, the data, or the checkpoint to resume does not fit.
        FileExistsError: there is a run, or a file that a run would write over, in `config.run.dir`.
        BlockingIOError: another process is training there.
        FileNotFoundError: there is none to resume, or no data.
        PeerFailed: another process of this run failed for one of these reasons, or is gone.
        Interrupted: SIGINT, SIGTERM or SIGUSR1 came while the run was first saved; it is saved.
    """

    def __init__(
        self,
        config: Config,
        train: Any = None,
        val: Any = None,
        *,
        resume: bool | Literal["auto"] = False,
        overwrite: bool = False,
    ) -> None:
        check(config)
        self.config, self.progress, self.ranks = config, Progress(), Ranks()
        self.directory = RunDirectory(config.run.dir)
        self.ranks.join()
        begin = partial(prepare, config, self.directory, self.ranks, train, val, resume=resume, overwrite=overwrite)
        parts = self.ranks.together(begin)
        self.train, self.val, self.learner, self.pace = parts.train, parts.val, parts.learner, parts.pace
        self.data = parts.data
        with self.ranks.peers():
            self.learner.start(self.ranks, self.pace.updates_per_epoch)
        self.clock = self.saved = time.monotonic()
        with StopRequest(self.ranks) as stop:
            self.ranks.together(lambda: self.open(parts.state))
            if not parts.state:
                self.save()
            try:
                stop.obey()
            except Interrupted as interrupted:
                raise self.resumable(interrupted) from None

    def open(self, state: dict[str, Any] | None) -> None:
        """Takes over the state, if there is one, and in the process that writes, makes the directory ready."""
        if state:
            self.restore(state)
        if self.ranks.main:
            environment = {**describe_environment(self.learner.device), "processes": self.ranks.world_size}
            self.directory.open(self.config.to_dict(), environment, self.progress.log_size if state else None)
        tensorboard = self.config.run.tensorboard
        self.monitor = Monitor(self.directory, self.pace, self.update, writing=self.ranks.main, tensorboard=tensorboard)

    @property
    def update(self) -> int:
        """Updates made or skipped so far."""
        return self.pace.update(self.progress)

    def restore(self, state: dict[str, Any]) -> None:
        """Takes over a state."""
        try:
            self.learner.restore(state)
            self.progress = Progress(**state["progress"])
        except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"{self.directory.state} is not the state of this run, whose model and optimizer refuse it: "
                f"{' '.join(str(error).split())}"
            ) from error

    def save(self) -> None:
        """Saves all that the run goes on from."""

        def write() -> None:
            if self.ranks.main:
                self.progress.log_size = self.directory.log.sync()
                parts = {"config": self.config.to_dict(), "data": self.data, "progress": asdict(self.progress)}
                self.directory.save({**parts, **self.learner.state()})

        self.ranks.together(write)
        self.saved = time.monotonic()

    def resumable(self, interrupted: Interrupted) -> Interrupted:
        """The same interruption of the run, now saved, with where it was and how it goes on."""
        progress = self.progress
        where = f"in epoch {progress.epoch + 1}, after {progress.batch} of {self.pace.batches} batches"
        how = f"python train_imagenet.py --resume {self.directory.path}"
        return Interrupted(interrupted.signum, f"{interrupted} {where}; go on with: {how}")

    def fit(self) -> dict[str, Any]:
        """Trains and evaluates to the last epoch.

        Returns:
            The results of the final weights, `top1`, `top5`, `loss`, and which they are, `weights`; `epochs`; `images`
            measured; `best`, epoch and top1 of the best epoch; `skipped` updates; `seconds`.

        Raises:
            Interrupted: SIGINT, SIGTERM or SIGUSR1 came; the run is saved.
            FloatingPointError: too many updates in a row were not finite.
            PeerFailed: another process of the run is gone.
        """
        progress = self.progress
        self.clock = time.monotonic()
        with StopRequest(self.ranks) as stop, self.ranks.peers():
            try:
                while progress.epoch < self.config.schedule.epochs:
                    self.train_epoch(stop)
                    self.measure_epoch(stop)
            except Interrupted as interrupted:
                self.save()
                self.monitor.draw_curves()
                raise self.resumable(interrupted) from None
            finally:
                self.monitor.close()
        self.monitor.draw_curves()
        weights, images = self.learner.weights, self.val.num_samples
        result = {**progress.results[weights], "weights": weights, "epochs": progress.epoch, "images": images}
        result |= {"best": progress.best, "skipped": progress.skipped, "seconds": progress.seconds}
        leave_report(self.directory, self.config, self.learner, self.val, self.ranks, result)
        return result

    def train_epoch(self, stop: StopRequest) -> None:
        """Makes the updates that are left of this epoch."""
        progress, pace, size = self.progress, self.pace, self.config.data.batch_size
        title = f"epoch {progress.epoch + 1}/{self.config.schedule.epochs}"
        self.learner.model.train()
        with closing(self.train.epoch(progress.epoch, start=progress.batch // pace.world_size)) as stream:
            with self.monitor.epoch(stream, title, pace.batches * size, progress.batch * size) as timed:
                while batches := pace.next_batches(progress):
                    loss, norm = self.make_update(timed, batches)
                    self.log_update(loss, norm, len(batches))
                    if self.checkpoint_due():
                        self.save()
                    stop.obey()

    def make_update(self, stream: Batches, batches: range) -> tuple[float, float]:
        """One update, skipped if the loss or its gradient is not finite.

        Args:
            stream: batches of images (B, 3, H, W) and targets (B,), of this process.
            batches: numbers in the epoch of the batches to take, of all processes.

        Returns:
            The loss and the norm of its gradient, over all processes.
        """
        progress, ranks = self.progress, self.ranks
        self.learner.scheduler.step_update(self.update)
        places = [(self.config.run.seed, progress.epoch, batch) for batch in batches[ranks.rank :: ranks.world_size]]
        own_loss, norm = self.learner.gradient(stream, places)
        loss = ranks.sum([own_loss])[0] / ranks.world_size
        progress.batch = batches.stop
        skip = not (math.isfinite(loss) and math.isfinite(norm))
        self.learner.step(self.update, skip)
        progress.losses.append(math.nan if skip else loss)
        progress.skipped += skip
        progress.skipped_in_row = progress.skipped_in_row + 1 if skip else 0
        if progress.skipped_in_row > self.config.run.max_skipped:
            file = self.directory.save_refused(ranks.rank, own_loss, *self.learner.inputs(self.train, places))
            raise FloatingPointError(
                f"{progress.skipped_in_row} updates in a row, up to batch {progress.batch} of epoch "
                f"{progress.epoch + 1}, had a loss or gradient that is not finite: lower optimizer.lr, or set run.amp "
                f"to off; the last batch is in {file}"
            )
        return loss, norm

    def log_update(self, loss: float, norm: float, batches: int) -> None:
        """Moves the bar, and writes a line of the log every `run.log_updates` and at the end of the epoch."""
        progress, every, size = self.progress, self.config.run.log_updates, self.config.data.batch_size
        self.tick()
        left = (self.config.schedule.epochs - progress.epoch) * self.pace.batches - progress.batch
        self.monitor.updated(batches * size, left * size, loss, self.learner.rate)
        if len(progress.losses) % every == 0 or progress.batch == self.pace.batches:
            loss = mean_loss(progress.losses[(len(progress.losses) - 1) // every * every :])
            values = {"loss": loss, "lr": self.learner.rate, "grad_norm": norm if math.isfinite(norm) else None}
            self.monitor.write("train", progress, self.update, **values)

    def checkpoint_due(self) -> bool:
        """Whether it is time for a checkpoint inside the epoch; process 0 looks at its clock for all."""
        run = self.config.run
        if run.checkpoint_updates and self.update % run.checkpoint_updates == 0:
            return True
        if not run.checkpoint_seconds:
            return False
        late = time.monotonic() - self.saved > run.checkpoint_seconds
        return self.ranks.sum([float(self.ranks.main and late)])[0] > 0

    def measure_epoch(self, stop: StopRequest) -> None:
        """Ends an epoch: measures the model and its average, and saves log, weights and state."""
        progress, learner = self.progress, self.learner
        for model in learner.models.values():
            self.ranks.share_buffers(model)
        progress.results = evaluate(learner.models, self.val, amp=learner.amp, on_batch=stop.obey, ranks=self.ranks)
        self.tick()
        train_loss, result = mean_loss(progress.losses), progress.results[learner.weights]
        self.monitor.write("epoch", progress, self.update, train_loss=train_loss, **progress.results)
        progress.epoch, progress.batch, progress.losses = progress.epoch + 1, 0, []
        best = not progress.best or result["top1"] > progress.best["top1"]
        if best:
            progress.best = {"epoch": progress.epoch, "top1": result["top1"]}
        self.ranks.together(lambda: self.save_weights(["best", "last"] if best else ["last"]))
        self.save()
        self.monitor.finished_epoch(progress, self.config.schedule.epochs, train_loss)

    def save_weights(self, checkpoints: list[str]) -> None:
        """Saves the weights that count, for others to load, as the "best" or the "last"."""
        if self.ranks.main:
            learner, epoch = self.learner, self.progress.epoch
            result = self.progress.results[learner.weights]
            record = {**learner.description, "class_names": self.train.class_names, "epoch": epoch, **result}
            for checkpoint in checkpoints:
                self.directory.save_weights(checkpoint, learner.models[learner.weights], record)

    def tick(self) -> None:
        """Counts the time since the last tick as the run's."""
        now = time.monotonic()
        self.progress.seconds += now - self.clock
        self.clock = now
