"""What a trained model takes for what: counted over the held-out data, and shown on some of its images."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import nn

from .distributed import Ranks
from .report import save_figure

COLUMNS, ROWS = 10, 5  # of the picture
Shown = tuple[torch.Tensor, int, int]  # an image (3, H, W) as the model sees it, its predicted and its true class


@dataclass
class Predictions:
    """What a model says of held-out images.

    Args:
        confusion: (classes, classes) int64; images of the class of the row that are taken for the class of the column.
        names: of the classes.
        mistakes: the first images that it gets wrong.
        sample: images at even distances, without those.
    """

    confusion: torch.Tensor
    names: list[str]
    mistakes: list[Shown]
    sample: list[Shown]


@torch.no_grad()
def predict(model: nn.Module, loader: Any, amp: torch.autocast, ranks: Ranks | None = None) -> Predictions:
    """Asks a model for the class of every held-out image.

    Args:
        model: classifier, on the loader's device; set to evaluation and left there.
        loader: the held-out data, or the share of it that this process has.
        amp: autocast context.
        ranks: the processes, whose counts are added up; the images that are shown come from this one.
    """
    ranks, classes = ranks or Ranks(), loader.num_classes
    model.eval()
    own = len(range(ranks.rank, loader.num_samples, ranks.world_size))
    wanted = set(torch.linspace(0, own - 1, COLUMNS * (ROWS - 1)).long().tolist())
    confusion = torch.zeros(classes, classes, dtype=torch.int64)
    sample, mistakes, start = [], [], 0
    with closing(loader.epoch(0)) as batches:
        for images, targets in batches:
            with amp:
                predicted = model(images).argmax(1).cpu()
            targets = targets.cpu()
            confusion += torch.bincount(targets * classes + predicted, minlength=classes**2).view(classes, classes)
            for i, (guess, truth) in enumerate(zip(predicted.tolist(), targets.tolist())):
                if guess != truth and len(mistakes) < COLUMNS:
                    mistakes.append((images[i].float().cpu(), guess, truth))
                elif start + i in wanted:
                    sample.append((images[i].float().cpu(), guess, truth))
            start += len(images)
    total = torch.tensor(ranks.sum(confusion.flatten().tolist())).long().view(classes, classes)
    return Predictions(total, loader.class_names or [str(i) for i in range(classes)], mistakes, sample)


def worst_classes(predictions: Predictions, most: int = 10) -> list[dict[str, Any]]:
    """The classes with the smallest shares of images that are recognised, the worst first; none without a mistake.

    Returns:
        For each: `name`, `images`, `top1` in percent, and `taken_for`, the three names that it most often gets instead,
        with how often.
    """
    rows = []
    for label, counts in enumerate(predictions.confusion):
        images, right = int(counts.sum()), int(counts[label])
        if right < images:
            wrong = counts.clone()
            wrong[label] = 0
            often, instead = wrong.topk(min(3, len(wrong)))
            taken = {predictions.names[i]: n for i, n in zip(instead.tolist(), often.tolist()) if n}
            top1 = 100 * right / images
            rows.append({"name": predictions.names[label], "images": images, "top1": top1, "taken_for": taken})
    return sorted(rows, key=lambda row: row["top1"])[:most]


def draw_predictions(path: Path, predictions: Predictions, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    """Draws held-out images with their labels: first row mistakes, if there are any, then the sample.

    Args:
        path: the PNG file.
        predictions: from `predict`.
        mean: channel means that the loader subtracted.
        std: channel standard deviations that it divided by.
    """
    confusion, names, mistakes = predictions.confusion, predictions.names, predictions.mistakes
    cells = mistakes + [None] * (-len(mistakes) % COLUMNS) + predictions.sample
    rows = -(-len(cells) // COLUMNS)
    height = 1.3 * rows + 0.4
    figure = Figure(figsize=(1.1 * COLUMNS, height))
    figure.subplots_adjust(left=0.01, right=0.99, bottom=0.01, top=1 - 0.6 / height, wspace=0.1, hspace=0.2)
    images = int(confusion.sum())
    wrong = images - int(confusion.trace())
    title = f"{wrong} of {images} held-out images are wrong (red); the others are a sample"
    figure.suptitle(title, y=1 - 0.1 / height, va="top")
    for axes, cell in zip(figure.subplots(rows, COLUMNS, squeeze=False).flat, cells + [None] * COLUMNS):
        axes.set_axis_off()
        if cell is not None:
            image, guess, truth = cell
            image = image * torch.tensor(std)[:, None, None] + torch.tensor(mean)[:, None, None]
            axes.imshow(image.clamp(0, 1).permute(1, 2, 0).numpy())
            right = guess == truth
            title = names[truth] if right else f"{names[guess]}, not {names[truth]}"
            axes.set_title(title, fontsize=8, color="black" if right else "red", parse_math=False)
    save_figure(path, figure)
