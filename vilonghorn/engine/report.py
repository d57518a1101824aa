"""What a run shows at its end: pictures of its predictions, and an HTML page."""

import base64
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from jinja2 import Template
from matplotlib.figure import Figure

from ..data.image_file import printable
from ..figures import cut_middle, fit_text, png
from .checkpoint import PICTURES, RunDirectory, write_file
from .config import Config
from .distributed import shell_path
from .evaluate import name_weights
from .predictions import COLUMNS, Predictions

BINS = 10  # of probabilities
MAX_CLASSES = 50  # of a confusion matrix, which is not readable with more, and rows of a table


def draw_predictions(found: Predictions, config: Config, weights: str) -> Figure:
    """Draws mistakes in red, with their files below, then a sample of the other held-out images."""
    examples = [*found.mistakes, *[None] * (-len(found.mistakes) % COLUMNS), *found.sample]
    right = sum(row.guess == row.truth for row in found.rows)
    wrong = len(found.rows) - right
    red = f"{len(found.mistakes)} of {wrong:,} mistakes (red, most confident first)"
    title = f"held-out images by the {weights}: {red} and {len(found.sample)} of {right:,} right predictions"
    rows = -(-len(examples) // COLUMNS)
    figure = Figure(figsize=(1.1 * COLUMNS, 1.5 * rows + 0.5))
    figure.subplots_adjust(0.01, 0.2 / figure.get_figheight(), 0.99, 1 - 0.75 / figure.get_figheight(), hspace=0.5)
    fit_text(figure.suptitle(title, y=1 - 0.1 / figure.get_figheight()), 1.1 * COLUMNS - 0.2, 0.25)
    mean, std = torch.tensor(config.data.mean), torch.tensor(config.data.std)
    for i, example in enumerate(examples, 1):
        if example is not None:
            image, row = example
            axes = figure.add_subplot(rows, COLUMNS, i, xticks=[], yticks=[], frame_on=False)
            axes.imshow((image.permute(1, 2, 0) * std + mean).clamp(0, 1).numpy())
            is_right = row.guess == row.truth
            text = f"{[*found.names, 'NaN'][row.guess]} ({row.probability:.0%})"
            text = text if is_right else f"{text},\nnot {found.names[row.truth]}"
            style = {"color": "black" if is_right else "red", "parse_math": False}
            fit_text(axes.set_title(text, fontsize=8, pad=2, **style), 1.0, 0.3)
            if not is_right:
                fit_text(axes.set_xlabel(row.file, fontsize=7, labelpad=2, **style), 1.0, 0.12)
    return figure


def draw_confusion(found: Predictions) -> Figure:
    """Draws the confusion matrix as numbers of images, in rows the true and in columns the predicted class."""
    from sklearn.metrics import ConfusionMatrixDisplay  # slow to import

    _, _, truth, guess, *_ = zip(*found.rows)
    names = [cut_middle(name, 16) for name in found.names] + ["NaN"] * (min(guess) < 0)
    labels = [*range(len(found.names)), -1][: len(names)]
    side = 3.5 + 0.35 * len(names)
    figure = Figure(figsize=(side, side), layout="constrained")
    axes = figure.add_subplot()
    style = {"cmap": "Blues", "colorbar": False, "xticks_rotation": "vertical", "values_format": "d", "ax": axes}
    shown = ConfusionMatrixDisplay.from_predictions(truth, guess, labels=labels, display_labels=names, **style)
    axes.set(xlabel="predicted class", ylabel="true class")
    for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        label.set_parse_math(False)
    for text in shown.text_.flat:
        text.set_visible(text.get_text() != "0")
    return figure


def draw_confidence(found: Predictions) -> Figure:
    """Draws how many predictions have which probability, and how many of those are right."""
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    counts, reliability = figure.subplots(1, 2)
    parts = [[100 * row.probability for row in found.rows if (row.guess == row.truth) == right] for right in (1, 0)]
    style = {"range": (0, 100), "stacked": True, "rwidth": 0.9, "color": ["C0", "red"], "label": ["right", "wrong"]}
    (right, images), edges, _ = counts.hist(parts, BINS, **style)
    counts.set(xlabel="probability of the predicted class, %", ylabel="held-out images")
    counts.legend()
    reliability.plot([0, 100], [0, 100], color="gray", linestyle="--", label="right as often as probable")
    reliability.plot(edges[1:] - 50 / BINS, 100 * right / np.where(images, images, np.nan), marker="o")
    reliability.set(xlabel="probability of the predicted class, %", ylabel="right predictions, %")
    reliability.legend()
    for axes in (counts, reliability):
        axes.grid(alpha=0.3)
    return figure


def write_report(directory: RunDirectory, config: Config, found: Predictions, result: dict[str, Any]) -> None:
    """Writes predictions.csv, the pictures of the predictions, and an HTML page of a finished run."""
    weights = name_weights("last", {"weights": result["weights"], "epoch": result["epochs"]})
    write_file(directory.path / "predictions.csv", found.csv())
    figures = {"predictions": draw_predictions(found, config, weights), "confidence": draw_confidence(found)}
    if 1 < len(found.names) <= MAX_CLASSES:
        figures["confusion"] = draw_confusion(found)
    files = (Path(config.data.held_out or "", row.file) for _, row in [*found.mistakes, *found.sample])
    image = shell_path(next(filter(Path.is_file, files), "photo.jpg"))
    _write_page(directory, config, result, figures, weights=weights, found=found, image=image, limit=MAX_CLASSES)


def write_masked_report(
    directory: RunDirectory, config: Config, examples: torch.Tensor, titles: tuple[str, ...], result: dict[str, Any]
) -> None:
    """Draws `examples` (rows, N, 3, H, W), normalised, with a title for each row, and writes an HTML page."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (config.data.mean, config.data.std))
    rows, columns = examples.shape[:2]
    figure = Figure(figsize=(1.2 * columns, 1.3 * rows))
    grid = figure.subplots(rows, columns, squeeze=False, subplot_kw={"xticks": [], "yticks": []})
    for axes, image in zip(grid.flat, (examples * std + mean).clamp(0, 1).flatten(0, 1)):
        axes.imshow(image.permute(1, 2, 0).numpy())
    for axes, title in zip(grid[:, 0], titles):
        axes.set_ylabel(title)
    _write_page(directory, config, result, {"reconstructions": figure})


def _write_page(
    directory: RunDirectory, config: Config, result: dict[str, Any], figures: dict[str, Figure], **values: Any
) -> None:
    files = {name: directory.path / f"{name}.png" for name in PICTURES}
    for name, figure in figures.items():
        write_file(files[name], png(figure))
    pictures = {name: base64.b64encode(file.read_bytes()).decode() for name, file in files.items() if file.exists()}
    template = Template(Path(__file__).with_name("report.html").read_text(encoding="utf-8"), autoescape=True)
    values |= {"directory": printable(str(directory.path)), "run": shell_path(directory.path), "result": result}
    values |= {"name": config.model.name, "records": directory.records(), "pictures": pictures}
    values |= {"config": yaml.safe_dump(config.to_dict(), sort_keys=False)}
    html = template.render(values, environment=directory.environment.read_text(encoding="utf-8"))
    write_file(directory.path / "report.html", html.encode(errors="backslashreplace"))
