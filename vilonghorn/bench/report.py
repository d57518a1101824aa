"""What a benchmark leaves: printed tables, the machine they are of, a plot, and a JSON file.

The file is one object. In every run:

    command     the words of the command          date      of its beginning, UTC
    machine     cpu, cores, threads, load (of the system, when the command began), versions, backends and why not
    seconds     that each subject took, by name   finished  false while subjects are missing

On a CPU, rows hold raw rounds, in which the contenders of a race took turns; a row without figures has a `problem`:

    rates       by step: slots_per_s by instruction set level, gb_per_s of a copy, each by round (see `bench_floor`)
    shape       B, L, D, N of the scan
    scan        rule, form ("torch loop", "torch chunked", a backend, or a level of the CPU's), train (with backward),
                ms, memory_gb, problem; arithmetic_ms and bytes_ms, the floors by round
    models      model, size in pixels, train, compiled (false), batch, ms, memory_gb, problem
    growth      as models: one model at its smallest and its largest size, in one race
    profile     model, batch, size, ms of a step, and ops: op, calls and ms a step
    targets     what, limit, value (null: not measured), verdict

On a GPU: copy, tables, models (as above, with images_per_s), profiles, not_measured; and, of a check, seed and checks.
"""

from __future__ import annotations

import json
import math
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
    title: str,
    samples: dict[str, list[float]],
    *,
    digits: int = 2,
    extra: dict[str, dict[str, float]] | None = None,
    paired: bool = False,
) -> dict[str, Any]:
    """Prints one table and returns it as plain data: milliseconds, spread and ratio to the first contender.

    Args:
        title: of the table.
        samples: seconds a call, by contender.
        digits: of milliseconds behind the point.
        extra: more columns, by contender; the same ones for each.
        paired: the contenders took turns, so that the ratio is the median of those of the rounds.
    """
    extra = extra or {}
    columns = list(next(iter(extra.values()), {}))
    first = next(iter(samples.values()))
    heads = "".join(f"{column:>11}" for column in columns)
    print(f"\n{title}\n  {'':28}{'median ms':>10}{'min':>9}{'max':>9}{heads}   against {next(iter(samples))}")
    rows = {}
    for name, values in samples.items():
        median = statistics.median(values)
        ratio = paired_ratio(values, first) if paired else median / statistics.median(first)
        words = f"{1 / ratio:.1f} times faster" if ratio < 0.5 else f"{ratio:.2f} times the time"
        figures = f"{median * 1e3:10.{digits}f}{min(values) * 1e3:9.{digits}f}{max(values) * 1e3:9.{digits}f}"
        figures += "".join(f"{extra[name][column]:11.4g}" for column in columns)
        print(f"  {name:28}{figures}   {words}")
        spread = dict(min_ms=min(values) * 1e3, max_ms=max(values) * 1e3)
        rows[name] = dict(median_ms=median * 1e3, **spread, ratio=ratio, **extra.get(name, {}))
    return dict(title=title, rows=rows)


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median, over rounds, of one sample to the other of the same round."""
    return statistics.median(a / b for a, b in zip(ours, theirs))


def tokens(row: dict[str, Any]) -> int:
    """In a batch of a row's model, which has patches of 16 pixels and a class token."""
    return row["batch"] * ((row["size"] // 16) ** 2 + 1)


def machine(device: str = "cpu") -> dict[str, object]:
    """What the figures were measured on."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    found = dict(
        cpu=cpu,
        cores=os.cpu_count(),
        load=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        threads=torch.get_num_threads(),
        python=platform.python_version(),
        torch=torch.__version__,
        timm=timm.__version__,
        vilonghorn=vilonghorn.__version__,
        backends=backends(device),
        omp_wait_policy=os.environ.get("OMP_WAIT_POLICY", "not set"),
    )
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
        path: the file, a .png or .svg.
        rows: of `bench_model.ModelTask`; those without figures are left out, and memory where none was measured.
        title: what they were measured on.
    """
    from matplotlib import rc_context  # not needed where nothing is drawn
    from matplotlib.figure import Figure

    measured = [row for row in rows if row.get("ms")]
    models = list(dict.fromkeys(row["model"] for row in measured))
    both = len({row["compiled"] for row in measured}) > 1
    remembered = any(row["memory_gb"] is not None for row in measured)
    figure = Figure(figsize=(11, 8 if remembered else 4.4), layout="constrained")
    grid = figure.subplots(1 + remembered, 2, squeeze=False)
    quantities = {"time of an image, ms": lambda row: statistics.median(row["ms"]) / row["batch"]}
    if remembered:
        quantities["peak memory of an image, GB"] = lambda row: (row["memory_gb"] or math.nan) / row["batch"]
    for line, (label, quantity) in zip(grid, quantities.items()):
        for axes, train in zip(line, (True, False)):
            for compiled, style in ((True, "-"), (False, "--")):
                for i, model in enumerate(models):
                    cells = [r for r in measured if (r["model"], r["train"], r["compiled"]) == (model, train, compiled)]
                    points = sorted((row["size"] ** 2, quantity(row)) for row in cells)
                    if points:
                        name = model + (", compiled" if compiled else ", eager") * both
                        axes.plot(*zip(*points), style, color=f"C{i}", marker=".", label=name)
            axes.set(
                xscale="log",
                yscale="log",
                xlabel="pixels of an image",
                ylabel=label,
                title="training step" if train else "inference",
            )
            axes.grid(alpha=0.3, which="both")
    lines = {line.get_label(): line for axes in figure.axes for line in axes.get_lines()}
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=4, fontsize="small")
    figure.suptitle(title)
    form = path.suffix.lstrip(".")
    metadata = {"Date": None} if form == "svg" else None  # equal figures make equal files
    with rc_context({"svg.hashsalt": "vilonghorn"}), replacing(path) as file:
        figure.savefig(file, format=form, dpi=120, metadata=metadata)
