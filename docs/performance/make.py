"""Fills the tables of performance.md, performance/gpu.md and choosing.md, and draws speed.svg.

Run `python docs/performance/make.py` in the root of a checkout. Figures come from cpu-*.json and v2*.json, which
`vilonghorn bench --json` and scan.py write, from kernels.json (compiled.py) and block.json (block.py), and those of the
GPU from gpu/*.json, which gpu_day.py writes.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from predict import predictions
from scan import LOOP
from scan import table as scan_lines

from vilonghorn.bench.candidates import FAMILIES
from vilonghorn.bench.interleaved import STEPS
from vilonghorn.bench.tables import Line, by, figure, fill_page, markdown, median, model_lines, ratio
from vilonghorn.data.files import atomic_write

FOLDER = Path("docs/performance")
PAGE, GPU_PAGE = Path("docs/performance.md"), FOLDER / "gpu.md"
PLOT = FOLDER / "speed.svg"
TINY, SMALL = "vilonghorn_tiny", "vilonghorn_small"
DEIT_TINY, DEIT_SMALL = (family[0] for family in FAMILIES)
DRAWN = "v2.json"  # the run of the plot
LINES = {DEIT_TINY: ("tab:gray", "s"), TINY: ("tab:orange", "o"), "vilonghornv2_tiny": ("tab:blue", "^")}
Run = dict[str, Any]


def tables(folder: Path) -> dict[Path, dict[str, str]]:
    """The tables of each page, by the name of their marks."""
    runs = [load(path) for path in sorted(folder.glob("cpu-*.json"))]
    v2, highest, high = (load(folder / f"{name}.json") for name in ("v2", "v2-highest", "v2-high"))
    kernels, predicted = json.loads((folder / "kernels.json").read_text()), predictions(folder)
    page = dict(
        speed=speed_table(runs, v2),
        runs="\n".join(map(machine_line, [*runs, v2])),
        scan=merge([[dict(list(line.items())[1:]) for line in scan_lines(run["scan"])] for run in runs], 2),
        ratios=ratio_table(runs),
        models=markdown(model_lines(v2["models"])),
        precision=precision_table(dict(highest=highest, high=high)),
        precision_runs="\n".join(map(machine_line, [highest, high])),
    )
    gpu = {name: markdown(lines) for name, lines in predicted.items()}
    gpu |= {name: kernel_table(kernels["rows"], name) for name in ("instructions", "registers")}
    gpu |= dict(gpu_models=gpu_model_table(folder / "gpu"), gpu_scans=gpu_scan_table(folder / "gpu"))
    return {PAGE: page, GPU_PAGE: gpu}


def load(path: Path) -> Run:
    """A run of the benchmark, with `file`, its name.

    Raises:
        ValueError: a candidate has no figures.
    """
    run = json.loads(path.read_text()) | dict(file=path.name)
    if problems := [row["problem"] for row in (*run.get("scan", ()), *run["models"]) if row["problem"]]:
        raise ValueError(f"{path} has {len(problems)} rows without figures, such as {problems[0]!r}: run it again")
    return run


def machine_line(run: Run) -> str:
    """A run: its file, machine and command."""
    found = run["machine"]
    return (
        f"- [{run['file']}](performance/{run['file']}), {run['date'][:10]}: {found['cpu']}, {found['threads']} threads "
        f"on {found['cores']} cores, load {found['load']:.2f} before the start, Python {found['python']}, torch "
        f"{found['torch']}, timm {found['timm']}: `{shlex.join(run['command'])}`"
    )


def merge(tables: Sequence[Sequence[Line]], num_keys: int) -> str:
    """The table of all runs from the table of each, "-" where a run has no such line.

    Args:
        tables: lines of each run.
        num_keys: how many of the first columns name a line. These are shown once.
    """
    runs = [{tuple(line.values())[:num_keys]: line for line in lines} for lines in tables]
    columns = list(dict.fromkeys(column for lines in tables for line in lines for column in line))
    merged = []
    for key in dict.fromkeys(key for run in runs for key in run):
        cells = {name: " / ".join(run.get(key, {}).get(name, "-") for run in runs) for name in columns[num_keys:]}
        merged.append(dict(zip(columns, key)) | cells)
    return markdown(merged)


def speed_table(runs: Sequence[Run], v2: Run) -> str:
    """The scan against the torch loop, the models against DeiT; the second family in a run of its own."""
    lines = []
    for rule in ("longhorn", "longhorn_exact"):
        line = {" ": f"scan, `{rule}`", "compared to": "the usual loop in torch"}
        for train, step in STEPS.items():
            scans = [by(run["scan"], "rule", "backend") for run in runs]
            faster = (figure(ratio(scan[rule, LOOP, train], scan[rule, "cpu", train]), 0) for scan in scans)
            line[step] = f"{' / '.join(faster)} times faster"
        lines.append(line)
    for family, found in (("vilonghorn", runs), ("vilonghornv2", [v2])):
        for size, ours, theirs in (
            *((size, f"{family}_tiny", DEIT_TINY) for size in (224, 512, 1024)),
            (224, f"{family}_small", DEIT_SMALL),
        ):
            line = {" ": f"`{ours}`, {size} px", "compared to": f"timm's `{theirs}`"}
            lines.append(
                line | {s: f"{to_other(found, ours, theirs, size, t)} times its time" for t, s in STEPS.items()}
            )
    return markdown(lines)


def ratio_table(runs: Sequence[Run]) -> str:
    """vilonghorn_tiny against DeiT-Ti at every size of both: time and peak memory."""
    lines = []
    for size in sorted({row["size"] for row in runs[0]["models"] if row["model"] == TINY}):
        line = {"px": f"{size}", "patches": f"{(size // 16) ** 2:,}"}
        for train, step in STEPS.items():
            line[f"time, {step}"] = to_other(runs, TINY, DEIT_TINY, size, train, bold_above=1)
        lines.append(line | {"memory": to_other(runs, TINY, DEIT_TINY, size, True, "memory_gb", bold_above=1)})
    return markdown(lines)


def to_other(
    runs: Sequence[Run], ours: str, theirs: str, size: int, train: bool, key: str = "ms", **form: float
) -> str:
    """The time or memory of a model to that of another, a figure of each run."""
    models = [by(run["models"], "model", "size") for run in runs]
    return " / ".join(
        figure(ratio(m.get((ours, size, train)), m.get((theirs, size, train)), key), **form) for m in models
    )


def precision_table(runs: dict[str, Run]) -> str:
    """Time of each model to that of DeiT in the same run, forward / with backward, by the precision of the products."""
    lines = []
    for family in FAMILIES:
        for size, name in dict.fromkeys((row["size"], row["model"]) for row in runs["highest"]["models"]):
            if name in family[1:] and not name.startswith("vilonghornv2"):  # it had other blocks in these runs
                line = {"px": f"{size}", "model": f"`{name}`"}
                for precision, run in runs.items():
                    ratios = (to_other([run], name, family[0], size, train, bold_above=1) for train in STEPS)
                    line[precision] = " / ".join(ratios)
                lines.append(line)
    return markdown(lines)


def kernel_table(rows: Sequence[dict[str, Any]], key: str) -> str:
    """A count of every compiled GPU kernel that runs bfloat16 with 16 states, by rule and architecture."""
    lines: dict[tuple[int, str], Line] = {}
    for row in sorted(rows, key=lambda row: (row["backend"], row["kernel"] != "forward")):
        known = row["kernel"] in ("forward", "backward") and key in row and row.get("states", 16) == 16
        if known and row["dtype"] in ("bfloat16", "bf16"):
            cell = row["architecture"], row["rule"]
            line = lines.setdefault(cell, {" ": f"{row['rule']}, sm_{row['architecture']}"})
            column = f"{row['backend']} {row['kernel']}"
            line[column] = str(max(row[key], int(line.get(column, 0))))
    return markdown([lines[cell] for cell in sorted(lines)])


def gpu_model_table(folder: Path) -> str:
    """Steps captured in CUDA graphs on a GPU, beside those of the DeiT in the same run."""
    lines = []
    for name in ("models-224", "models-512", "models-1024", "models-first", "models-small"):
        run = json.loads((folder / f"{name}.json").read_text())
        size, batch = (run["command"][run["command"].index(option) + 1] for option in ("--size", "--batch"))
        for model in ("vilonghornv2_tiny", TINY, "vim_tiny", "vilonghornv2_small"):
            deit = f"{DEIT_SMALL if 'small' in model else DEIT_TINY}, captured"
            if deit not in run[STEPS[False]] or f"{model}, captured" not in run[STEPS[False]]:
                continue
            line = {"model": f"`{model}`", "px": size, "batch": batch}
            for step in STEPS.values():
                ours, theirs = run[step][f"{model}, captured"], run[step][deit]
                line |= {f"{step}: ms": figure(median(ours)), f"{step}: to DeiT": figure(ratio(ours, theirs))}
            lines.append(line)
    return markdown(lines)


def gpu_scan_table(folder: Path) -> str:
    """The scans of one direction on a GPU."""
    run, names = json.loads((folder / "peers.json").read_text()), {"triton chunks": "triton, in chunks of heads"}
    lines = []
    for name in run[STEPS[False]]:
        rule, backend = name.split(", ")
        line = {"rule": f"`{rule}`", "kernel": names.get(backend, backend)}
        lines.append(line | {f"{step}: ms": f"{median(run[step][name]):.3f}" for step in STEPS.values()})
    return markdown(lines)


def draw(path: Path, run: Run) -> None:
    """Draws milliseconds of an image against its side for the tiny models; equal figures make equal files."""
    plot = Figure(figsize=(8, 3.4), layout="constrained")
    for axes, (train, step) in zip(plot.subplots(1, 2), STEPS.items()):
        for name, (color, marker) in LINES.items():
            rows = [row for row in run["models"] if (row["model"], row["train"]) == (name, train)]
            rows.sort(key=lambda row: row["size"])
            sizes = [row["size"] for row in rows]
            ms = [median(row) / row["batch"] for row in rows]
            axes.loglog(sizes, ms, marker=marker, color=color, label=name)
        axes.set(title=step, xlabel="height and width of the image, pixels", ylabel="milliseconds per image")
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_minor_locator(NullLocator())
        axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    plot.suptitle(plot_title(run), fontsize="medium")
    with rc_context({"svg.hashsalt": "vilonghorn"}), atomic_write(path) as file:
        plot.savefig(file, format="svg", metadata={"Date": None})


def plot_title(run: Run) -> str:
    """The title of the plot: machine, threads and date."""
    return f"{run['machine']['cpu']}, {run['machine']['threads']} threads, {run['date'][:10]}"


def filled(path: Path, contents: dict[str, str]) -> str:
    """The text of a page with its tables."""
    text = path.read_text(encoding="utf-8")
    for name, content in contents.items():
        text = fill_page(text, name, content)
    return text


def main() -> int:
    """Writes the pages and the plot; returns the exit status."""
    if not GPU_PAGE.is_file():
        sys.exit(f"error: there is no {GPU_PAGE} here: run this in the root of a checkout")
    try:
        texts = {path: filled(path, contents) for path, contents in tables(FOLDER).items()}
    except ValueError as error:
        sys.exit(f"error: {error}")
    for path, text in texts.items():
        with atomic_write(path, "w") as file:
            file.write(text)
    draw(PLOT, load(FOLDER / DRAWN))
    return 0


if __name__ == "__main__":
    sys.exit(main())
