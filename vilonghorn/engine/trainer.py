"""The training loop. A run can be stopped at any moment, and resumes to the same result."""

import math
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from typing import Any, Literal

import torch

from .checkpoint import RunDirectory, load_state, save_state, save_weights
from .config import Config, check
from .config_file import changed_keys
from .device import pick_device
from .distributed import Distributed, Interrupted, StopRequest
from .environment import machine
from .evaluate import TRANSFORM, average_lags, evaluate, quality
from .loaders import Source, build_loader, check_classes, open_data
from .logger import RunLogger, mean_loss
from .model_setup import explain_model_errors, model_kwargs
from .predictions import hide_top5
from .train_state import Batch, Progress, StepCounter, TrainState

FEW_UPDATES = 20  # in an epoch
SMALL_BATCH = 8  # images; a smaller batch makes noisy gradients

Resume = bool | Literal["auto"]


class Trainer:
    """A training run: started, or resumed from its last checkpoint.

    Args:
        config: the run.
        train: loader of the training data, as a `vilonghorn.data.Loader`; None: made from the configuration.
        val: loader of the held-out data; None: made from the configuration.
        resume: resume from the last checkpoint in `config.run.dir`; "auto": if there is one, else start.
        overwrite: replace a run in `config.run.dir`.

    Raises:
        ValueError: the configuration, the data, or the checkpoint to resume from does not fit.
        FileExistsError: there is a run in `config.run.dir`, or a file that a run would overwrite.
        BlockingIOError: another process is training there.
        FileNotFoundError: there is no checkpoint to resume from, or no data.
        PeerFailed: another process of this run failed for one of these reasons, or died.
        Interrupted: SIGINT, SIGTERM or SIGUSR1 was received during the first checkpoint; the run is saved.
    """

    def __init__(
        self, config: Config, train: Any = None, val: Any = None, *, resume: Resume = False, overwrite: bool = False
    ) -> None:
        check(config)
        self.config, self.progress, self.dist = config, Progress(), Distributed()
        # Of the last update: loss and norm, the event after which they are on the CPU, rate, number of batches.
        self.unread: tuple[torch.Tensor, torch.cuda.Event | None, float, int] | None = None
        self.directory, self.start = RunDirectory(config.run.dir), time.monotonic()
        self.dist.init()
        state = self.dist.run_on_all(lambda: self._find_state(resume, overwrite))
        missing = [split for split, given in (("train", train), ("val", val)) if given is None]
        sources = open_data(config, None if train is None else train.class_names, missing)
        self.dist.run_on_all(lambda: self._build(train, val, sources, state))
        with self.dist.peer_errors():
            self.train_state.setup(self.dist, self.steps.updates_per_epoch)
        with StopRequest(self.dist, self._where_stopped) as stop:
            self.dist.run_on_all(lambda: self._open(state, overwrite))
            if state and not self.finished:
                updates = self.steps.updates_per_epoch * config.schedule.epochs
                self.dist.print(f"resuming {config.run.dir} {self._position()} (update {self.update} of {updates})")
            if not state:
                self._warn_of_few_updates()
                self.save()
            stop.check()

    def fit(self) -> dict[str, Any]:
        """Trains and evaluates to the last epoch, or until `schedule.patience` ends the run.

        Returns:
            Results of the final weights: `top1`, `top5`, `loss`, and `weights`, "model" or "ema"; `epochs`; `images`
            evaluated; `best`, epoch, top1 and loss of the best epoch; `skipped` updates; `seconds`. Without labels
            there is no `top1` and `top5`.

        Raises:
            Interrupted: SIGINT, SIGTERM or SIGUSR1 was received; the run is saved.
            FloatingPointError: too many updates in a row were not finite.
            PeerFailed: another process of the run failed.
        """
        progress, now = self.progress, time.monotonic()
        self.start, self.saved = now - progress.seconds, now
        with StopRequest(self.dist, self._where_stopped) as stop, self.dist.peer_errors():
            try:
                if not self.finished:
                    self.train_state.task.prepare(self.train_loader, self.directory.path, stop.check)
                while not self.finished:
                    self.train_epoch(stop)
                    self.evaluate_epoch(stop)
            except Interrupted:
                self.save()
                self.logger.draw_curves()
                raise
            finally:
                self.logger.close()
        self.logger.draw_curves()
        state, images = self.train_state, self.val_loader.num_samples
        if average_lags(progress.results, images):
            remedy = f"lower ema.decay ({self.config.ema.decay}), or make it 0 for a short run"
            self.dist.print(f"the average of the weights (ema) is clearly worse than the last weights: {remedy}")
        result = {**progress.results[state.reported], "weights": state.reported, "epochs": progress.epoch}
        result |= {"images": images, "best": progress.best, "skipped": progress.skipped, "seconds": progress.seconds}
        state.task.report(state.models[state.reported], self.val_loader, self.directory, self.config, result)
        return result

    def train_epoch(self, stop: StopRequest) -> None:
        """Makes the remaining updates of this epoch."""
        progress, steps, state = self.progress, self.steps, self.train_state
        state.model.train()
        with closing(self.train_loader.epoch(progress.epoch, start=progress.batch // steps.world_size)) as stream:
            with self.logger.epoch(stream, progress) as timed:
                while batches := steps.next_batches(progress):
                    self.make_update(timed, batches)
                    if self._checkpoint_is_due():
                        self.save()
                    stop.check()
                self.read_update()

    def make_update(self, stream: Iterator[Batch], batches: range) -> None:
        """Makes one update, skipped if it is not finite, of the `batches` of all processes; reads the one before it."""
        progress, dist, state = self.progress, self.dist, self.train_state
        state.scheduler.step_update(self.update)
        positions = [(self.config.run.seed, progress.epoch, batch) for batch in batches[dist.rank :: dist.world_size]]
        measured = state.update(stream, positions, self.update + 1)
        copy, copied = measured.to("cpu", non_blocking=True), None
        if measured.is_cuda:
            copied = torch.cuda.Event()
            copied.record()
        self.read_update()
        lr = max(group["lr"] for group in state.optimizer.param_groups)  # layer decay lowers those of other layers
        progress.batch, self.unread = batches.stop, (copy, copied, lr, len(batches))

    def read_update(self) -> None:
        """Waits for the last update, counts and logs it, unless that is done; called after the next one was started."""
        if not self.unread:
            return
        (measured, copied, lr, batches), self.unread = self.unread, None
        if copied:
            copied.synchronize()
        progress, (loss, norm) = self.progress, measured.tolist()
        skip = not (math.isfinite(loss) and math.isfinite(norm))
        progress.losses.append(math.nan if skip else loss)
        progress.skipped += skip
        progress.skipped_in_row = progress.skipped_in_row + 1 if skip else 0
        progress.seconds = time.monotonic() - self.start
        if progress.skipped_in_row > self.config.run.max_skipped:
            skipped = f"{progress.skipped_in_row} updates in a row, up to update {self.update} (loss {loss})"
            what = f"{skipped}, had a loss or gradient that is not finite: lower optimizer.lr, or set run.amp to off"
            raise FloatingPointError(what)
        self.logger.log_update(progress, loss, norm, lr, batches)

    def evaluate_epoch(self, stop: StopRequest) -> None:
        """Ends an epoch: evaluates the model and its average, and saves log, weights and state."""
        progress, state = self.progress, self.train_state
        for model in state.models.values():
            self.dist.broadcast_buffers(model)
        task = {"names": state.task.scores, "measure": state.task.measure}
        progress.results = evaluate(state.models, self.val_loader, amp=state.amp, on_batch=stop.check, **task)
        progress.seconds = time.monotonic() - self.start
        train_loss, result = mean_loss(progress.losses), progress.results[state.reported]
        shown = {name: hide_top5(scores, state.num_classes) for name, scores in progress.results.items()}
        self.logger.write("epoch", progress, train_loss=train_loss, **shown)
        progress.epoch, progress.batch, progress.losses = progress.epoch + 1, 0, []
        is_best = not progress.best or quality(result) > quality(progress.best)
        if is_best:
            progress.best = {"epoch": progress.epoch, **{k: result[k] for k in ("top1", "loss") if k in result}}
        if self.dist.is_main and self.finished:
            self.directory.write_log(kind="end", epoch=progress.epoch, reason=self.finished)
        self.save(weights=["best", "last"] if is_best else ["last"])
        self.logger.log_epoch(progress, train_loss)
        if self.finished and progress.epoch < self.config.schedule.epochs:
            self.dist.print(f"the run ends {self.finished}")

    def save(self, weights: Sequence[str] = ()) -> None:
        """Saves the full state, after the weights that give the results as "best" or "last"."""
        self.read_update()
        self.dist.run_on_all(lambda: self._write(weights) if self.dist.is_main else None)
        self.saved = time.monotonic()

    @property
    def finished(self) -> str:
        """Why there are no more epochs to train; "" if there are. The same in all processes."""
        epoch, best, schedule = self.progress.epoch, int(self.progress.best.get("epoch", 0)), self.config.schedule
        if self.progress.batch:  # a resumed run may have another patience
            return ""
        if epoch < schedule.epochs and schedule.patience and epoch - best >= schedule.patience:
            limit = f"the last {epoch - best} were not better than epoch {best} (schedule.patience)"
            return f"after {epoch} of {schedule.epochs} epochs, because {limit}"
        return f"after {epoch} epoch(s)" if epoch == schedule.epochs else ""

    @property
    def update(self) -> int:
        """Number of updates so far, skipped ones included."""
        return self.steps.update(self.progress)

    def _write(self, weights: Sequence[str]) -> None:
        state, progress = self.train_state, self.progress
        for name in weights:
            record = {"model": self.config.model.name, "kwargs": model_kwargs(self.config, state.num_classes)}
            record |= {"weights": state.reported, "class_names": self.train_loader.class_names, "epoch": progress.epoch}
            record["data"] = {key: value for key, value in asdict(self.config.data).items() if key in TRANSFORM}
            record |= {"val_images": self.data["val_images"], **progress.results[state.reported]}
            model = state.task.backbone(state.models[state.reported])
            save_weights(self.directory.weights(name), model.state_dict(), record)
        progress.log_size = self.directory.sync_log()
        parts = {"config": self.config.to_dict(), "data": self.data, "progress": asdict(progress)}
        save_state(self.directory.state, {**parts, **state.state_dict()})

    def _checkpoint_is_due(self) -> bool:
        """Whether to save inside the epoch, by the number of updates or by the clock of process 0."""
        run = self.config.run
        if run.checkpoint_updates and self.update % run.checkpoint_updates == 0:
            return True
        is_late = time.monotonic() - self.saved > (run.checkpoint_seconds or math.inf)
        return self.dist.sum([self.dist.is_main and is_late])[0] > 0

    def _warn_of_few_updates(self) -> None:
        """Warns if an epoch has few updates, and the batch of an update can be made smaller."""
        images, updates = self.train_loader.num_samples, self.steps.updates_per_epoch
        batch = self.config.data.batch_size * self.config.optimizer.accumulate * self.config.augmentation.repeats
        if self.dist.is_main and updates < FEW_UPDATES and batch > SMALL_BATCH:
            remedy = "lower data.batch_size, optimizer.accumulate or augmentation.repeats"
            warnings.warn(f"an epoch of {images} images has only {updates} update(s): {remedy}", stacklevel=3)

    def _position(self) -> str:
        return f"in epoch {self.progress.epoch + 1}, after {self.progress.batch} of {self.steps.batches} batches"

    def _where_stopped(self) -> str:
        return f"{self._position()}; {self.dist.resume_command(self.directory.path)}"

    def _find_state(self, resume: Resume, overwrite: bool) -> dict[str, Any] | None:
        """Checks the directory of the run; returns the state to resume from."""
        config, directory, dist = self.config, self.directory, self.dist
        if dist.is_main:
            directory.check_is_writable()
        resume = directory.has_updates() if resume == "auto" else resume
        if not (resume or overwrite):
            directory.check_is_free()
        if dist.is_main and directory.state.exists():
            directory.lock()
        state = load_state(directory.state) if resume else None
        if state and (changed := changed_keys(state["config"], config.to_dict())):
            raise ValueError(f"{config.run.dir} was started with another {', '.join(changed)}: resume with the same")
        return state

    def _build(self, train: Any, val: Any, sources: dict[str, Source], state: dict[str, Any] | None) -> None:
        """Builds and checks the parts of the run without writing anything."""
        config, dist, device = self.config, self.dist, pick_device(self.config.run.device)
        if train is None:
            train = build_loader(config, device, training=True, source=sources["train"])
        if val is None:
            val = build_loader(config, device, training=False, source=sources["val"], classes=train.class_names)
        check_classes(config.data.train, train.num_classes, train.class_names, config.data.val, val)
        self.train_loader, self.val_loader = train, val
        self.steps = StepCounter(len(train), config.optimizer.accumulate, dist.world_size)
        self.data = {"images": train.num_samples, "classes": train.num_classes, "batches": self.steps.batches}
        self.data["batches_per_update"] = self.steps.batches_per_update
        for split, loader in (("train", train), ("val", val)):
            self.data[split] = loader.fingerprint
            self.data[f"{split}_images"] = getattr(loader, "content", None)  # a loader of one's own may not have it
        if state:
            config = replace(config, model=replace(config.model, weights=None, pretrained=False))  # state has weights
        self.train_state = TrainState(config, train.num_classes, device, train.class_names)
        if digest := self.train_state.task.digest:
            self.data["teacher"] = digest
        if state:
            check_data(config, state["data"], self.data)

    def _open(self, state: dict[str, Any] | None, overwrite: bool) -> None:
        """Loads the state, if any, and prepares the directory and the logs."""
        if state:
            with explain_model_errors(f"{self.directory.state} is not the state of this run", "start a new run"):
                self.train_state.load_state_dict(state)
                self.progress = Progress(**state["progress"])
        if self.dist.is_main:
            environment = {**machine(self.train_state.device.type), "processes": self.dist.world_size}
            log_size, names = self.progress.log_size if state else None, self.train_loader.class_names
            self.directory.open(self.config, environment, names, log_size, overwrite)
        self.logger = RunLogger(self.config, self.directory, self.steps, self.update, enabled=self.dist.is_main)


def check_data(config: Config, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Raises ValueError if a resumed run does not have the same data, or not the same batches per update."""
    sources = {"train": f" of data.train ({config.data.train})", "val": f" of data.val ({config.data.held_out})"}
    sources |= {f"{split}_images": f" of the images of data.{split}" for split in ("train", "val")}
    sources["teacher"] = f" of task.teacher ({', '.join(config.task.teacher) or 'none'})"
    for key in {**old, "teacher": None}:
        if old.get(key) != new.get(key) and (old.get(key) or not key.endswith("_images")):
            what = f"fingerprint{sources[key]}" if key in sources else f"number of {key.replace('_', ' ')}"
            same = "resume with the same data and teacher, and the same optimizer.accumulate times processes"
            raise ValueError(f"the {what} is {new.get(key)}, but the run was started with {old.get(key)}: {same}")
