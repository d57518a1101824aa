"""What a run shows while it goes: a progress bar, the lines of its log, and the same numbers for TensorBoard."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

from tqdm import tqdm

from .checkpoint import space_needed
from .directory import RunDirectory
from .progress import Pace, Progress
from .report import draw_curves

T = TypeVar("T")
SECONDS_BETWEEN_CURVES = 60


class Meter:
    """Images a second, and the share of the time spent waiting for data."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Starts to count anew."""
        self.images, self.waited, self.since = 0, 0.0, time.monotonic()

    def timed(self, stream: Iterator[T]) -> Iterator[T]:
        """The same items; the time until each is there counts as waited."""
        while True:
            asked = time.monotonic()
            try:
                item = next(stream)
            except StopIteration:
                return
            self.waited += time.monotonic() - asked
            yield item

    def read(self) -> dict[str, float]:
        """`images_per_second` and `data_wait` (0 to 1) since the last reset."""
        passed = max(time.monotonic() - self.since, 1e-9)
        return {"images_per_second": round(self.images / passed, 2), "data_wait": round(self.waited / passed, 4)}


class Monitor:
    """The eyes of a run; those of its processes that do not write keep them shut.

    Args:
        directory: of the run, open where this process writes.
        pace: of the run.
        update: the update that the run goes on from; later events of the directory are hidden.
        writing: whether this process shows anything.
        tensorboard: write TensorBoard events.

    Raises:
        ImportError: `tensorboard` is wanted but not installed.
    """

    def __init__(self, directory: RunDirectory, pace: Pace, update: int, *, writing: bool, tensorboard: bool) -> None:
        self.directory, self.pace, self.writing, self.events = directory, pace, writing, None
        self.meter, self.lap, self.drawn = Meter(), Meter(), time.monotonic()
        if writing and tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # half a second, and TensorFlow where that is installed

            self.events = SummaryWriter(directory.events, purge_step=update + 1)

    @contextmanager
    def epoch(self, stream: Iterator[T], title: str, images: int, done: int) -> Iterator[Iterator[T]]:
        """Shows the bar of an epoch while entered, and gives the batches on.

        Args:
            stream: the batches, which this times.
            title: before the bar.
            images: images in the epoch, of all processes.
            done: those that were trained on before.
        """
        self.meter.reset()
        self.lap.reset()
        hidden = None if self.writing else True
        with tqdm(total=images, initial=done, desc=title, unit="img", leave=False, disable=hidden) as self.bar:
            yield self.lap.timed(self.meter.timed(stream))

    def updated(self, images: int, images_left: int, loss: float, rate: float) -> None:
        """Moves the bar.

        Args:
            images: images of the update, of all processes.
            images_left: images until the end of the run.
            loss: of the update.
            rate: learning rate of the update.
        """
        self.meter.images += images
        self.lap.images += images
        speed = self.meter.read()
        left = timedelta(seconds=round(images_left / speed["images_per_second"])) if speed["images_per_second"] else "?"
        shown = {"loss": f"{loss:.3f}", "lr": f"{rate:.2e}", "data": f"{speed['data_wait']:.0%}", "run": f"{left}"}
        self.bar.set_postfix(shown, refresh=False)
        self.bar.update(images)

    def write(self, kind: str, progress: Progress, update: int, **values: Any) -> None:
        """Adds a line to the log, and its numbers to the events; one of kind "train" tells the speed since the last."""
        if not self.writing:
            return
        speed = self.lap.read() if kind == "train" else {}
        self.lap.reset()
        record = {**values, "skipped": progress.skipped, "seconds": round(progress.seconds, 3), **speed}
        self.directory.log.write(kind=kind, epoch=progress.epoch + 1, update=update, **record)
        if self.events:
            with space_needed(self.directory.events):
                for name, value in record.items():
                    for part, number in value.items() if isinstance(value, dict) else [(None, value)]:
                        if isinstance(number, (int, float)):
                            self.events.add_scalar(f"{kind}/{name}" + (f"/{part}" if part else ""), number, update)

    def finished_epoch(self, progress: Progress, epochs: int, train_loss: float | None) -> None:
        """Prints a line on the epoch that was just measured, and draws the curves now and then."""
        if time.monotonic() - self.drawn > SECONDS_BETWEEN_CURVES:
            self.draw_curves()
        if self.writing:
            loss = "not finite" if train_loss is None else f"{train_loss:.3f}"
            shown = ", ".join(f"{name} {values['top1']:.2f}%" for name, values in progress.results.items())
            title = f"epoch {progress.epoch}/{epochs}"
            print(f"{title}: training loss {loss}, held-out top-1 {shown}, {progress.seconds:.0f} s", flush=True)

    def draw_curves(self) -> None:
        """Draws what the log holds."""
        if self.writing:
            draw_curves(self.directory.curves, self.directory.log.records(), self.pace.updates_per_epoch)
        self.drawn = time.monotonic()

    def close(self) -> None:
        """Brings the last events to the disk."""
        if self.events:
            with space_needed(self.directory.events):
                self.events.close()
