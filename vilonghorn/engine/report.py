"""What a run shows: progress bar and logs (rank 0 only), and at the end its pictures and an HTML page."""

import base64
import math
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

import torch
import yaml
from jinja2 import Template
from matplotlib.figure import Figure
from matplotlib.text import Text
from torch import nn
from tqdm import tqdm

from ..data.files import explain_full_disk
from ..data.images import printable
from .checkpoint import RESUME, RunDirectory, read_log, write_file
from .config import Config
from .evaluate import name_weights, top_classes
from .train_state import Progress, StepCounter, TrainState

T = TypeVar("T")
SECONDS_BETWEEN_CURVES = 60
COLUMNS, ROWS = 10, 5  # of the picture of predictions
SMALLEST = 6.0  # points of a letter
Example = tuple[torch.Tensor, int, int]  # image (3, H, W), normalised; predicted class; true class


def mean_loss(losses: list[float]) -> float | None:
    """The mean of the finite losses; None if there is none."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    return sum(finite) / len(finite) if finite else None


class RunLogger:
    """The progress bar, the JSON log, TensorBoard events, curves, and the printed lines of a run.

    Does nothing unless `enabled`. TensorBoard events after `update`, from which the run resumes, are hidden.
    """

    def __init__(self, config: Config, directory: RunDirectory, steps: StepCounter, update: int, enabled: bool) -> None:
        self.config, self.directory, self.steps, self.enabled, self.events = config, directory, steps, enabled, None
        self.drawn = time.monotonic()
        self._reset_speed()
        if enabled and config.run.tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # slow to import

            self.events = SummaryWriter(directory.events, purge_step=update + 1)

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
            with explain_full_disk(self.directory.events, RESUME):
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
            shown = ", ".join(f"{name} {values['top1']:.2f}%" for name, values in progress.results.items())
            title = f"epoch {progress.epoch}/{self.config.schedule.epochs}"
            print(f"{title}: training loss {loss}, held-out top-1 {shown}, {progress.seconds:.0f} s", flush=True)

    def draw_curves(self) -> None:
        """Draws the curves of the log."""
        if self.enabled:
            log = read_log(self.directory.log_file)
            draw_curves(self.directory.path / "curves.png", log, self.steps.updates_per_epoch)
        self.drawn = time.monotonic()

    def close(self) -> None:
        """Writes the last TensorBoard events."""
        if self.events:
            with explain_full_disk(self.directory.events, RESUME):
                self.events.close()


def png(figure: Figure) -> bytes:
    """The bytes of a PNG file."""
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    return buffer.getvalue()


def shorten(text: str, length: int) -> str:
    """Cuts a text in its middle to at most `length` characters."""
    return text if len(text) <= length else text[: length // 2] + "…" + text[len(text) - (length - 1) // 2 :]


def fit_text(text: Text, width: float, height: float) -> None:
    """Fits a text into a box of inches: reduces the font down to `SMALLEST`, then leaves out letters."""

    def excess() -> float:
        box = text.get_window_extent()
        return max(box.width / width, box.height / height) / text.get_figure(root=True).dpi

    while excess() > 1 and text.get_fontsize() > SMALLEST:
        text.set_fontsize(max(SMALLEST, 0.97 * text.get_fontsize() / excess()))
    lines = text.get_text().split("\n")
    for length in range(max(map(len, lines)), 1, -1):
        if excess() <= 1:
            break
        text.set_text("\n".join(shorten(line, length - 1) for line in lines))


def draw_curves(path: Path, records: list[dict[str, Any]], updates_per_epoch: int) -> None:
    """Draws loss, top-1 and learning rate over epochs, from the lines of a log."""
    train = [record for record in records if record["kind"] == "train"]
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    panels = dict(zip(("loss", "top-1, %", "learning rate"), figure.subplots(1, 3)))
    position = [record["update"] / updates_per_epoch for record in train]
    panels["loss"].plot(position, [record["loss"] for record in train], label="training", alpha=0.6)
    panels["learning rate"].plot(position, [record["lr"] for record in train])
    for weights, label, color in (("model", "held out", "C1"), ("ema", "held out, EMA", "C2")):
        epochs = [record for record in records if record["kind"] == "epoch" and weights in record]
        style = {"label": label, "color": color, "marker": "." if len(epochs) == 1 else None}
        for title, score in (("loss", "loss"), ("top-1, %", "top1")) if epochs else ():
            panels[title].plot([e["epoch"] for e in epochs], [e[weights][score] for e in epochs], **style)
    for title, axes in panels.items():
        axes.set(title=title, xlabel="epoch")
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    write_file(path, png(figure))


@torch.no_grad()
def predict_examples(model: nn.Module, loader: Any, amp: torch.autocast) -> list[Example | None]:
    """Classifies the held-out images of this process. Returns examples for `draw_predictions`.

    The first images that are classified wrongly, at most a row, filled up with None; then evenly spaced other images.
    """
    model.eval()
    sampled = set(torch.linspace(0, len(loader) * loader.batch_size - 1, COLUMNS * (ROWS - 1)).long().tolist())
    sample, mistakes, index = [], [], 0
    with closing(loader.epoch(0)) as batches:
        for images, targets in batches:
            with amp:
                logits = model(images)
            for image, guess, truth in zip(images, top_classes(logits.float())[:, 0].tolist(), targets.tolist()):
                if guess != truth and len(mistakes) < COLUMNS:
                    mistakes.append((image.float().cpu(), guess, truth))
                elif index in sampled:
                    sample.append((image.float().cpu(), guess, truth))
                index += 1
    return [*mistakes, *[None] * (-len(mistakes) % COLUMNS), *sample]


def draw_predictions(path: Path, examples: list[Example | None], names: list[str], config: Config, title: str) -> None:
    """Draws held-out images with their classes, black if the prediction is right; `names` are those of the classes."""
    rows = -(-len(examples) // COLUMNS)
    figure = Figure(figsize=(1.1 * COLUMNS, 1.4 * rows + 0.5))
    figure.subplots_adjust(0.01, 0.1 / figure.get_figheight(), 0.99, 1 - 0.75 / figure.get_figheight(), hspace=0.4)
    fit_text(figure.suptitle(title, y=1 - 0.1 / figure.get_figheight()), 1.1 * COLUMNS - 0.2, 0.25)
    mean, std = torch.tensor(config.data.mean), torch.tensor(config.data.std)
    for i, example in enumerate(examples, 1):
        if example is not None:
            image, guess, truth = example
            axes = figure.add_subplot(rows, COLUMNS, i)
            axes.set_axis_off()
            axes.imshow((image.permute(1, 2, 0) * std + mean).clamp(0, 1).numpy())
            predicted = names[guess] if guess >= 0 else "NaN"
            text, color = (predicted, "black") if guess == truth else (f"{predicted},\nnot {names[truth]}", "red")
            fit_text(axes.set_title(text, fontsize=8, pad=2, color=color, parse_math=False), 1.0, 0.3)
    write_file(path, png(figure))


def write_report(directory: RunDirectory, config: Config, state: TrainState, val: Any, result: dict[str, Any]) -> None:
    """Draws predictions of a finished run, and writes an HTML page."""
    weights = name_weights("last", {"weights": result["weights"], "epoch": result["epochs"]})
    names = [printable(name) for name in val.class_names or map(str, range(val.num_classes))]
    examples = predict_examples(state.models[state.weights], val, state.amp)
    title = f"held-out images by the {weights}: mistakes (red), then a sample"
    draw_predictions(directory.path / "predictions.png", examples, names, config, title)
    pictures = {name: (directory.path / f"{name}.png").read_bytes() for name in ("curves", "predictions")}
    template = Template(Path(__file__).with_name("report.html").read_text(encoding="utf-8"), autoescape=True)
    html = template.render(
        name=config.model.name,
        directory=directory.path,
        records=directory.records(),
        weights=weights,
        result=result,
        pictures={name: base64.b64encode(content).decode() for name, content in pictures.items()},
        config=yaml.safe_dump(config.to_dict(), sort_keys=False),
        environment=directory.environment.read_text(encoding="utf-8"),
    )
    write_file(directory.path / "report.html", html.encode())
