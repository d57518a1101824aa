"""What a run shows at its end: pictures of its predictions, and an HTML page."""

import base64
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from jinja2 import Template
from matplotlib.figure import Figure
from torch import nn

from ..figures import cut_middle, fit_text, png
from .checkpoint import PICTURES, RunDirectory, write_file
from .config import Config
from .distributed import Distributed
from .evaluate import name_weights, top_classes

COLUMNS, ROWS = 10, 5  # of the picture of predictions
BINS = 10  # of probabilities
MAX_CLASSES = 50  # of a confusion matrix, which is not readable with more


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
            text = f"{[*names, 'NaN'][example.guess]} ({example.probability:.0%})"
            text = text if is_right else f"{text},\nnot {names[example.truth]}"
            style = {"fontsize": 8, "pad": 2, "color": "black" if is_right else "red", "parse_math": False}
            fit_text(axes.set_title(text, **style), 1.0, 0.3)
    write_file(path, png(figure))


def draw_confusion(path: Path, found: Predictions, names: list[str]) -> None:
    """Draws the confusion matrix as numbers of images, in rows the true and in columns the predicted class."""
    from sklearn.metrics import ConfusionMatrixDisplay  # slow to import

    labels = [cut_middle(name, 16) for name in names] + ["NaN"] * any(guess < 0 for _, guess in found.counts)
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
    confusions = [(n, names[t], [*names, "NaN"][g]) for (t, g), n in found.counts.most_common() if t != g]
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
    grid = figure.subplots(rows, columns, squeeze=False, subplot_kw={"xticks": [], "yticks": []})
    for axes, image in zip(grid.flat, (examples * std + mean).clamp(0, 1).flatten(0, 1)):
        axes.imshow(image.permute(1, 2, 0).numpy())
    for axes, title in zip(grid[:, 0], titles):
        axes.set_ylabel(title)
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
