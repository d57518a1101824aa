"""What a benchmark leaves: printed tables, the machine they are of, a JSON file and a plot."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import timm
import torch

import vilonghorn
from vilonghorn.data.files import replacing
from vilonghorn.ops import backends


def table(
    title: str, samples: dict[str, list[float]], *, digits: int = 2, extra: dict[str, dict[str, float]] | None = None
) -> dict[str, Any]:
    """Prints one table and returns it as plain data: milliseconds, spread and ratio to the first contender.

    Args:
        title: of the table.
        samples: seconds a call, by contender.
        digits: of milliseconds behind the point.
        extra: more columns, by contender; the same ones for each.
    """
    extra = extra or {}
    columns = list(next(iter(extra.values()), {}))
    first = statistics.median(next(iter(samples.values())))
    heads = "".join(f"{column:>11}" for column in columns)
    print(f"\n{title}\n  {'':28}{'median ms':>10}{'min':>9}{'max':>9}{heads}   against {next(iter(samples))}")
    rows = {}
    for name, values in samples.items():
        median = statistics.median(values)
        ratio = f"{first / median:.1f} times faster" if median < first else f"{median / first:.2f} times the time"
        figures = f"{median * 1e3:10.{digits}f}{min(values) * 1e3:9.{digits}f}{max(values) * 1e3:9.{digits}f}"
        figures += "".join(f"{extra[name][column]:11.4g}" for column in columns)
        print(f"  {name:28}{figures}   {ratio}")
        spread = dict(min_ms=min(values) * 1e3, max_ms=max(values) * 1e3)
        rows[name] = dict(median_ms=median * 1e3, **spread, ratio=median / first, **extra.get(name, {}))
    return dict(title=title, rows=rows)


def machine(device: str = "cpu") -> dict[str, object]:
    """What the figures were measured on."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    found = dict(
        cpu=cpu, threads=torch.get_num_threads(), python=platform.python_version(), torch=torch.__version__,
        timm=timm.__version__, vilonghorn=vilonghorn.__version__, backends=backends(device),
        omp_wait_policy=os.environ.get("OMP_WAIT_POLICY", "not set"),
    )  # fmt: skip
    if device == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        found |= dict(gpu=gpu.name, multiprocessors=gpu.multi_processor_count, cuda=torch.version.cuda)
        found |= {name: _version(name) for name in ("triton", "mamba_ssm")}
    return found


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def write_json(path: Path, report: dict[str, Any]) -> None:
    with replacing(path) as file:
        file.write((json.dumps(report, indent=1, allow_nan=False) + "\n").encode())


def draw_models(path: Path, rows: Sequence[dict[str, Any]], title: str) -> None:
    """Draws time and peak memory of an image against its pixels, for training and inference.

    Args:
        path: the PNG file.
        rows: of `bench_model.ModelTask`; those without figures are left out, and memory where none was measured.
        title: what they were measured on.
    """
    from matplotlib.figure import Figure  # not needed where nothing is drawn

    measured = [row for row in rows if "ms" in row]
    models = list(dict.fromkeys(row["model"] for row in measured))
    remembered = any(row["memory_gb"] is not None for row in measured)
    figure = Figure(figsize=(11, 8 if remembered else 4.4), layout="constrained")
    grid = figure.subplots(1 + remembered, 2, squeeze=False)
    quantities = {"time of an image, ms": lambda row: statistics.median(row["ms"]) / row["batch"]}
    if remembered:
        quantities["peak memory of an image, GB"] = lambda row: row["memory_gb"] / row["batch"]
    for line, (label, quantity) in zip(grid, quantities.items()):
        for axes, train in zip(line, (True, False)):
            for compiled, style in ((True, "-"), (False, "--")):
                for i, model in enumerate(models):
                    cells = [r for r in measured if (r["model"], r["train"], r["compiled"]) == (model, train, compiled)]
                    points = sorted((row["size"] ** 2, quantity(row)) for row in cells)
                    if points:
                        name = f"{model}, {'compiled' if compiled else 'eager'}"
                        axes.plot(*zip(*points), style, color=f"C{i}", marker=".", label=name)
            axes.set(
                xscale="log", yscale="log", xlabel="pixels of an image", ylabel=label,
                title="training step" if train else "inference",
            )  # fmt: skip
            axes.grid(alpha=0.3, which="both")
    lines = {line.get_label(): line for axes in figure.axes for line in axes.get_lines()}
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=4, fontsize="small")
    figure.suptitle(title)
    with replacing(path) as file:
        figure.savefig(file, format="png", dpi=120)
