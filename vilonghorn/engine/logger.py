"""What a run shows while it trains: progress bar, printed lines, JSON log, TensorBoard events and curves, on rank 0."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from matplotlib.figure import Figure
from tqdm import tqdm

from ..figures import png
from .checkpoint import RunDirectory, full_disk_explained, read_log, write_file
from .config import Config
from .train_state import Progress, StepCounter

T = TypeVar("T")
SECONDS_BETWEEN_CURVES = 60


def mean_loss(losses: list[float]) -> float | None:
    """The mean of the finite losses; None if there is none."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    return sum(finite) / len(finite) if finite else None


class RunLogger:
    """The progress bar, the JSON log, TensorBoard events, curves and printed lines of a run, if `enabled`."""

    def __init__(self, config: Config, directory: RunDirectory, steps: StepCounter, update: int, enabled: bool) -> None:
        self.config, self.directory, self.steps, self.enabled, self.events = config, directory, steps, enabled, None
        self.drawn, self.bar = time.monotonic(), tqdm(disable=True)
        self._reset_speed()
        if enabled and config.run.tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # slow to import

            self.events = SummaryWriter(directory.events, purge_step=update + 1)  # hides those after `update`

    def _reset_speed(self) -> None:
        self.images, self.waited, self.since = 0, 0.0, time.monotonic()

    def _speed(self) -> dict[str, float]:
        """Images per second, and the fraction of time spent waiting for data, since the last reset."""
        elapsed = max(time.monotonic() - self.since, 1e-9)
        return {"images_per_second": round(self.images / elapsed, 2), "data_wait": round(self.waited / elapsed, 4)}

    @contextmanager
    def epoch(self, stream: Iterator[T], progress: Progress) -> Iterator[Iterator[T]]:
        """Shows the progress bar of an epoch, and yields its batches; the time to get each counts as waiting."""
        title, size = f"epoch {progress.epoch + 1}/{self.config.schedule.epochs}", self.config.data.batch_size
        count = {"total": self.steps.batches * size, "initial": progress.batch * size, "unit": "img"}
        disable = None if self.enabled else True  # None: only on a terminal
        self._reset_speed()
        with tqdm(desc=title, leave=False, disable=disable, **count) as self.bar:
            yield self._timed(stream)

    def _timed(self, stream: Iterator[T]) -> Iterator[T]:
        start = time.monotonic()
        for item in stream:
            self.waited += time.monotonic() - start
            yield item
            start = time.monotonic()

    def log_update(self, progress: Progress, loss: float, grad_norm: float, lr: float, batches: int) -> None:
        """Advances the progress bar by an update, and writes a log line every `run.log_updates` and after an epoch."""
        size, every, losses = self.config.data.batch_size, self.config.run.log_updates, progress.losses
        self.images += batches * size
        if not self.bar.disable:
            images_left = ((self.config.schedule.epochs - progress.epoch) * self.steps.batches - progress.batch) * size
            rate, waited = self.bar.format_dict["rate"], self._speed()["data_wait"]
            left = timedelta(seconds=round(images_left / rate)) if rate else "?"
            shown = {"loss": f"{loss:.3f}", "lr": f"{lr:.2e}", "data": f"{waited:.0%}", "run": f"{left}"}
            self.bar.set_postfix(shown, refresh=False)
        self.bar.update(batches * size)
        if len(losses) % every == 0 or progress.batch == self.steps.batches:
            loss = mean_loss(losses[(len(losses) - 1) // every * every :])
            self.write("train", progress, loss=loss, lr=lr, grad_norm=grad_norm if math.isfinite(grad_norm) else None)

    def write(self, kind: str, progress: Progress, **values: Any) -> None:
        """Writes a line of kind "train" or "epoch" to the log, and its numbers as TensorBoard events."""
        if not self.enabled:
            return
        update = self.steps.update(progress)
        speed = self._speed() if kind == "train" else {}
        self._reset_speed()
        record = {**values, "skipped": progress.skipped, "seconds": round(progress.seconds, 3), **speed}
        self.directory.write_log(kind=kind, epoch=progress.epoch + 1, update=update, **record)
        if self.events:
            with full_disk_explained(self.directory.events):
                for name, value in record.items():
                    for part, number in value.items() if isinstance(value, dict) else [(None, value)]:
                        if isinstance(number, (int, float)):
                            self.events.add_scalar(f"{kind}/{name}" + (f"/{part}" if part else ""), number, update)

    def log_epoch(self, progress: Progress, train_loss: float | None) -> None:
        """Prints a line on an evaluated epoch, and updates the curves at most once a minute."""
        if time.monotonic() - self.drawn > SECONDS_BETWEEN_CURVES:
            self.draw_curves()
        if self.enabled:
            loss = "not finite" if train_loss is None else f"{train_loss:.3f}"
            classes = any("top1" in values for values in progress.results.values())
            key, kind, form, unit = ("top1", "top-1", ".2f", "%") if classes else ("loss", "loss", ".4f", "")
            shown = ", ".join(f"{name} {values[key]:{form}}{unit}" for name, values in progress.results.items())
            title = f"epoch {progress.epoch}/{self.config.schedule.epochs}"
            print(f"{title}: training loss {loss}, held-out {kind} {shown}, {progress.seconds:.0f} s", flush=True)

    def draw_curves(self) -> None:
        """Draws the curves of the log."""
        if self.enabled:
            log = read_log(self.directory.log_file)
            draw_curves(self.directory.path / "curves.png", log, self.steps.updates_per_epoch)
        self.drawn = time.monotonic()

    def close(self) -> None:
        """Writes the last TensorBoard events."""
        if self.events:
            with full_disk_explained(self.directory.events):
                self.events.close()


def draw_curves(path: Path, records: list[dict[str, Any]], updates_per_epoch: int) -> None:
    """Draws loss, top-1 and learning rate over epochs, from the lines of a log."""
    train = [record for record in records if record["kind"] == "train"]
    figure = Figure(figsize=(12, 3.8), layout="constrained")
    panels = dict(zip(("loss", "top-1, %", "learning rate"), figure.subplots(1, 3)))
    position = [record["update"] / updates_per_epoch for record in train]
    panels["loss"].plot(position, [record["loss"] for record in train], label="training", alpha=0.6)
    panels["learning rate"].plot(position, [record["lr"] for record in train])
    for weights, label, color in (("model", "held out", "C1"), ("ema", "held out, EMA", "C2")):
        epochs = [record for record in records if record["kind"] == "epoch" and weights in record]
        style = {"label": label, "color": color, "marker": "." if len(epochs) == 1 else None}
        for title, score in (("loss", "loss"), ("top-1, %", "top1")) if epochs else ():
            if score in epochs[0][weights]:
                panels[title].plot([e["epoch"] for e in epochs], [e[weights][score] for e in epochs], **style)
    for title, axes in panels.items():
        axes.set(title=title, xlabel="epoch")
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    write_file(path, png(figure))
