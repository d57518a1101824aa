"""What a run shows: progress bar and logs (rank 0 only), and at the end its pictures and an HTML page."""

import base64
import math
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import yaml
from jinja2 import Template
from matplotlib.figure import Figure
from matplotlib.text import Text
from torch import nn
from tqdm import tqdm

from .checkpoint import PICTURES, RunDirectory, full_disk_explained, read_log, write_file
from .config import Config
from .distributed import Distributed
from .evaluate import name_weights, top_classes
from .train_state import Progress, StepCounter

T = TypeVar("T")
SECONDS_BETWEEN_CURVES = 60
COLUMNS, ROWS = 10, 5  # of the picture of predictions
BINS = 10  # of probabilities
MAX_CLASSES = 50  # of a confusion matrix, which is not readable with more
SMALLEST = 6.0  # points of a letter


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
        self.drawn, self.bar = time.monotonic(), tqdm(disable=True)
        self._reset_speed()
        self.wandb = None
        if enabled and config.run.wandb:
            import wandb

            options = {"dir": directory.path, "group": directory.path.name, "config": config.to_dict()}
            try:
                self.wandb = wandb.init(project="vilonghorn", sync_tensorboard=True, **options)
            except wandb.errors.Error as error:
                raise OSError(f"run.wandb: {error}; run wandb login, or set WANDB_MODE=offline") from error
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
            note = explain_losses(self.config)
            draw_curves(self.directory.path / "curves.png", log, self.steps.updates_per_epoch, note)
        self.drawn = time.monotonic()

    def close(self) -> None:
        """Writes the last TensorBoard events."""
        if self.events:
            with full_disk_explained(self.directory.events):
                self.events.close()
        if self.wandb:
            self.wandb.finish()


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
    length = max(map(len, lines))
    while length > 1 and (too_large := excess()) > 1:
        length = min(length - 1, int(length / too_large))
        text.set_text("\n".join(shorten(line, length) for line in lines))


def draw_curves(path: Path, records: list[dict[str, Any]], updates_per_epoch: int, note: str = "") -> None:
    """Draws loss, top-1 and learning rate over epochs, from the lines of a log, above a note."""
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
    figure.supxlabel(note, x=0.01, ha="left", fontsize=10)
    write_file(path, png(figure))


def explain_losses(config: Config) -> str:
    """Why the training loss of a run lies above its held-out loss."""
    recipe = config.augmentation
    on = {"cropped": recipe.scale[0] < 1, "mixed (mixup, cutmix)": recipe.mixup or recipe.cutmix}
    on |= {"augmented": recipe.auto_augment or recipe.color_jitter, "partly erased": recipe.erase}
    reasons = [f"its images are {', '.join(name for name, is_on in on.items() if is_on)}"] if any(on.values()) else []
    reasons += [f"its targets have label smoothing {recipe.label_smoothing:g}"] if recipe.label_smoothing else []
    return f"Training loss may lie above held-out loss: {' and '.join(reasons)}." if reasons else ""


class Example(NamedTuple):
    """A held-out image with its prediction."""

    image: torch.Tensor  # (3, H, W), normalised
    guess: int  # predicted class; -1: the scores contain NaN
    truth: int  # true class
    probability: float  # of the predicted class


@dataclass
class Predictions:
    """What a model predicts for the held-out images."""

    counts: Counter[tuple[int, int]]  # images by true and predicted class
    confidence: torch.Tensor  # (2, BINS) images by whether the prediction is right, and by its probability
    mistakes: list[Example]  # those with the highest probability, at most a row
    sample: list[Example]  # images with a right prediction, evenly spaced


@torch.no_grad()
def predict_all(model: nn.Module, loader: Any, amp: torch.autocast, dist: Distributed) -> Predictions:
    """Classifies the held-out images, each process its part, and returns the predictions for all of them."""
    model.eval()
    count = COLUMNS * (ROWS - 1) // dist.world_size
    sampled = set(torch.linspace(0, len(loader) * loader.batch_size - 1, count).long().tolist())
    counts, confidence, mistakes, sample, index = Counter(), torch.zeros(2, BINS), [], [], 0
    with closing(loader.epoch(0)) as batches:
        for images, targets in batches:
            with amp:
                logits = model(images)
            guesses, highest = top_classes(logits.float())[:, 0], logits.float().softmax(1).amax(1).nan_to_num()
            for image, *values in zip(images, guesses.tolist(), targets.tolist(), highest.tolist()):
                guess, truth, probability = values
                counts[truth, guess] += 1
                confidence[int(guess == truth), min(BINS - 1, int(probability * BINS))] += 1
                if guess != truth:
                    mistakes.append(Example(image.float().cpu(), *values))
                    mistakes = sorted(mistakes, key=lambda example: -example.probability)[:COLUMNS]
                elif index in sampled:
                    sample.append(Example(image.float().cpu(), *values))
                index += 1
    parts = dist.gather((counts, confidence, mistakes, sample))
    mistakes = sorted((example for part in parts for example in part[2]), key=lambda example: -example.probability)
    sample = [example for part in parts for example in part[3]]
    return Predictions(sum((p[0] for p in parts), Counter()), sum(p[1] for p in parts), mistakes[:COLUMNS], sample)


def draw_predictions(path: Path, found: Predictions, names: list[str], config: Config, weights: str) -> None:
    """Draws mistakes in red, then a sample of the other held-out images; `names` are those of the classes."""
    examples = [*found.mistakes, *[None] * (-len(found.mistakes) % COLUMNS), *found.sample]
    wrong, right = (int(count) for count in found.confidence.sum(1))
    red = f"{len(found.mistakes)} of {wrong:,} mistakes (red, most confident first)"
    title = f"held-out images by the {weights}: {red} and {len(found.sample)} of {right:,} right predictions"
    rows = -(-len(examples) // COLUMNS)
    figure = Figure(figsize=(1.1 * COLUMNS, 1.4 * rows + 0.5))
    figure.subplots_adjust(0.01, 0.1 / figure.get_figheight(), 0.99, 1 - 0.75 / figure.get_figheight(), hspace=0.4)
    fit_text(figure.suptitle(title, y=1 - 0.1 / figure.get_figheight()), 1.1 * COLUMNS - 0.2, 0.25)
    mean, std = torch.tensor(config.data.mean), torch.tensor(config.data.std)
    for i, example in enumerate(examples, 1):
        if example is not None:
            axes = figure.add_subplot(rows, COLUMNS, i)
            axes.set_axis_off()
            axes.imshow((example.image.permute(1, 2, 0) * std + mean).clamp(0, 1).numpy())
            is_right = example.guess == example.truth
            text = f"{name_guess(names, example.guess)} ({example.probability:.0%})"
            text = text if is_right else f"{text},\nnot {names[example.truth]}"
            style = {"fontsize": 8, "pad": 2, "color": "black" if is_right else "red", "parse_math": False}
            fit_text(axes.set_title(text, **style), 1.0, 0.3)
    write_file(path, png(figure))


def name_guess(names: list[str], guess: int) -> str:
    """The name of a predicted class; NaN if the scores contain NaN."""
    return names[guess] if guess >= 0 else "NaN"


def draw_confusion(path: Path, found: Predictions, names: list[str]) -> None:
    """Draws the confusion matrix as numbers of images, in rows the true and in columns the predicted class."""
    from sklearn.metrics import ConfusionMatrixDisplay  # slow to import

    labels = [shorten(name, 16) for name in names] + ["NaN"] * any(guess < 0 for _, guess in found.counts)
    matrix = torch.zeros(len(labels), len(labels), dtype=torch.long)
    for (truth, guess), count in found.counts.items():
        matrix[truth, guess] = count
    side = 3.5 + 0.35 * len(labels)
    figure = Figure(figsize=(side, side), layout="constrained")
    axes = figure.add_subplot()
    display = ConfusionMatrixDisplay(matrix.numpy(), display_labels=labels)
    display.plot(ax=axes, cmap="Blues", colorbar=False, xticks_rotation="vertical", values_format="d")
    axes.set(xlabel="predicted class", ylabel="true class")
    for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        label.set_parse_math(False)
    for text in display.text_.flat:
        text.set_visible(text.get_text() != "0")
    write_file(path, png(figure))


def draw_confidence(path: Path, found: Predictions) -> None:
    """Draws how many predictions have which probability, and how many of those are right."""
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    counts, reliability = figure.subplots(1, 2)
    wrong, right = found.confidence
    centers = [100 * (i + 0.5) / BINS for i in range(BINS)]
    counts.bar(centers, right, 90 / BINS, label="right")
    counts.bar(centers, wrong, 90 / BINS, bottom=right, color="red", label="wrong")
    counts.set(xlabel="probability of the predicted class, %", ylabel="held-out images")
    counts.legend()
    reliability.plot([0, 100], [0, 100], color="gray", linestyle="--", label="right as often as probable")
    reliability.plot(centers, 100 * right / (right + wrong), marker="o")  # bins without images are NaN
    reliability.set(xlabel="probability of the predicted class, %", ylabel="right predictions, %")
    reliability.legend()
    for axes in (counts, reliability):
        axes.grid(alpha=0.3)
    write_file(path, png(figure))


def write_report(
    directory: RunDirectory, config: Config, names: list[str], found: Predictions, result: dict[str, Any]
) -> None:
    """Draws the predictions of a finished run, and writes an HTML page; `names` are those of the classes."""
    weights = name_weights("last", {"weights": result["weights"], "epoch": result["epochs"]})
    draw_predictions(directory.path / "predictions.png", found, names, config, weights)
    draw_confidence(directory.path / "confidence.png", found)
    if len(names) <= MAX_CLASSES:
        draw_confusion(directory.path / "confusion.png", found, names)
    confusions = [(count, names[t], name_guess(names, g)) for (t, g), count in found.counts.most_common() if t != g]
    _write_page(directory, config, result, weights=weights, classes=len(names), confusions=confusions[:10])


def write_masked_report(
    directory: RunDirectory, config: Config, examples: torch.Tensor, titles: tuple[str, ...], result: dict[str, Any]
) -> None:
    """Draws held-out images, and what the model makes of them, and writes an HTML page.

    `examples` are (rows, N, 3, H, W), normalised, and `titles` are those of the rows.
    """
    mean, std = (torch.tensor(values)[:, None, None] for values in (config.data.mean, config.data.std))
    rows, columns = examples.shape[:2]
    figure = Figure(figsize=(1.2 * columns, 1.3 * rows))
    for i, image in enumerate((examples * std + mean).clamp(0, 1).flatten(0, 1), 1):
        axes = figure.add_subplot(rows, columns, i)
        axes.imshow(image.permute(1, 2, 0).numpy())
        axes.set(xticks=[], yticks=[])
    for row, title in enumerate(titles):
        figure.axes[row * columns].set_ylabel(title)
    write_file(directory.path / "reconstructions.png", png(figure))
    _write_page(directory, config, result)


def _write_page(directory: RunDirectory, config: Config, result: dict[str, Any], **values: Any) -> None:
    files = {name: directory.path / f"{name}.png" for name in PICTURES}
    pictures = {name: base64.b64encode(file.read_bytes()).decode() for name, file in files.items() if file.exists()}
    template = Template(Path(__file__).with_name("report.html").read_text(encoding="utf-8"), autoescape=True)
    html = template.render(
        name=config.model.name,
        directory=directory.path,
        records=directory.records(),
        result=result,
        pictures=pictures,
        **values,
        config=yaml.safe_dump(config.to_dict(), sort_keys=False),
        environment=directory.environment.read_text(encoding="utf-8"),
    )
    write_file(directory.path / "report.html", html.encode())
