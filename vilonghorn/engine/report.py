"""What a run tells of itself while it goes: the environment that it runs in, and its curves."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

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


def save_figure(path: Path, figure: Figure) -> None:
    """Saves a figure as PNG, whole."""
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    write_whole(path, lambda file: file.write(buffer.getvalue()))
