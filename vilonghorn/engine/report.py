"""What a run shows to people: the environment it ran in, its curves, and a picture of its predictions."""

from __future__ import annotations

import os
import platform
from contextlib import closing
from importlib import metadata
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import nn

from .. import __version__, ops
from .checkpoint import write_whole

PACKAGES = ("torch", "torchvision", "timm", "triton", "numpy", "ffcv", "numba", "safetensors")


def describe_environment(device: torch.device) -> dict[str, Any]:
    """What a run depends on beyond its configuration: versions, device, threads and scan backends."""
    versions = {"vilonghorn": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "versions": versions,
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "device_type": device.type,
        "cpu_count": os.cpu_count(),
        "cpu_threads": torch.get_num_threads(),
        "scan_backends": ops.backends(device),
    }


def draw_curves(path: Path, records: list[dict[str, Any]], updates_per_epoch: int) -> None:
    """Draws loss, top-1 and learning rate over epochs.

    Args:
        path: the PNG file.
        records: lines of the log, of kinds "train" and "epoch".
        updates_per_epoch: turns updates into epochs.
    """
    train = [r for r in records if r["kind"] == "train"]
    epochs = [r for r in records if r["kind"] == "epoch"]
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    loss, top1, rate = figure.subplots(1, 3)
    position = [r["update"] / updates_per_epoch for r in train]
    loss.plot(position, [r["loss"] for r in train], label="training", alpha=0.6)
    rate.plot(position, [r["lr"] for r in train])
    for weights, label, color in (("model", "held out", "C1"), ("ema", "held out, EMA", "C2")):
        measured = [r for r in epochs if weights in r]
        if measured:
            at = [r["epoch"] for r in measured]
            style = {"label": label, "color": color, "marker": "." if len(at) < 2 else None}
            loss.plot(at, [r[weights]["loss"] for r in measured], **style)
            top1.plot(at, [r[weights]["top1"] for r in measured], **style)
    for axes, title in ((loss, "loss"), (top1, "top-1, %"), (rate, "learning rate")):
        axes.set(title=title, xlabel="epoch")
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    save_figure(path, figure)


@torch.no_grad()
def draw_predictions(
    path: Path,
    model: nn.Module,
    loader: Any,
    amp: torch.autocast,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    columns: int = 10,
    rows: int = 5,
) -> None:
    """Draws held-out images with their labels: first row mistakes, if there are any, then images at even distances.

    Args:
        path: the PNG file.
        model: classifier, on the loader's device.
        loader: the held-out data.
        amp: autocast context.
        mean: channel means that the loader subtracted.
        std: channel standard deviations that it divided by.
        columns: images in a row.
        rows: rows at most.
    """
    model.eval()
    wanted = set(torch.linspace(0, loader.num_samples - 1, columns * (rows - 1)).long().tolist())
    sample, mistakes, wrong, start = [], [], 0, 0
    with closing(loader.epoch(0)) as batches:
        for images, targets in batches:
            with amp:
                predicted = model(images).argmax(1).tolist()
            for i, (guess, truth) in enumerate(zip(predicted, targets.tolist())):
                wrong += guess != truth
                if guess != truth and len(mistakes) < columns:
                    mistakes.append((images[i].float().cpu(), guess, truth))
                elif start + i in wanted:
                    sample.append((images[i].float().cpu(), guess, truth))
            start += len(images)
    mistakes += [None] * (-len(mistakes) % columns)
    cells = mistakes + sample
    rows = -(-len(cells) // columns)
    height = 1.3 * rows + 0.4
    figure = Figure(figsize=(1.1 * columns, height))
    figure.subplots_adjust(left=0.01, right=0.99, bottom=0.01, top=1 - 0.6 / height, wspace=0.1, hspace=0.2)
    title = f"{wrong} of {loader.num_samples} held-out images are wrong (red); the others are a sample"
    figure.suptitle(title, y=1 - 0.1 / height, va="top")
    names = loader.class_names or [str(i) for i in range(loader.num_classes)]
    for axes, cell in zip(figure.subplots(rows, columns, squeeze=False).flat, cells + [None] * columns):
        axes.set_axis_off()
        if cell is not None:
            image, guess, truth = cell
            image = image * torch.tensor(std)[:, None, None] + torch.tensor(mean)[:, None, None]
            axes.imshow(image.clamp(0, 1).permute(1, 2, 0).numpy())
            right = guess == truth
            title = names[truth] if right else f"{names[guess]}, not {names[truth]}"
            axes.set_title(title, fontsize=8, color="black" if right else "red", parse_math=False)
    save_figure(path, figure)


def save_figure(path: Path, figure: Figure) -> None:
    """Saves a figure as PNG, whole."""
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    write_whole(path, lambda file: file.write(buffer.getvalue()))
