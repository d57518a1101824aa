"""Fills the tables of the pages on speed from results/, draws their plots, and says what the README may claim.

    python benchmarks/pages.py

in the root of a checkout. A page has a table between the lines <!-- NAME --> and <!-- end of NAME -->; `tables` has the
names. The figures are those that models.py, scan.py, front.py, gpu_day.py and export_weights.py wrote.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import front
from interleaved import STEPS
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from page_tables import by, figure, markdown, median, ratio, write_page
from scan import table as scan_lines

from vilonghorn.data.atomic_files import atomic_write

ROOT = Path(__file__).parents[1]
DOCS, RESULTS = ROOT / "docs", ROOT / "benchmarks" / "results"
DEIT, V2, TINY = "deit_tiny_patch16_224", "vilonghornv2_tiny", "vilonghorn_tiny"
SIZES = (224, 512, 1024)
# `vilonghornv2_tiny` had other blocks in the last two, which are left out for it.
CPU_RUNS = ("cpu-1", "cpu-2", "v2", "v2-avx2", "v2-highest", "v2-high")
FRONT_RUNS = {"front": "with AVX-512", "front-avx2": "AVX2 only"}  # and the processor of each
V2_RUN, *_ = V2_RUNS = CPU_RUNS[2:4]
LINES = {DEIT: ("tab:gray", "s"), TINY: ("tab:orange", "o"), V2: ("tab:blue", "^")}  # of the plot
GPU_RUNS = ("models-224", "models-512", "models-1024", "models-first", "models-small")
Run = dict[str, Any]


def load(name: str) -> Run:
    """A file of results/, with `file`, its name.

    Raises:
        ValueError: a candidate has no figures.
    """
    path = RESULTS / f"{name}.json"
    run = json.loads(path.read_text(encoding="utf-8")) | {"file": path.name}
    if problems := [row["problem"] for row in (*run.get("scan", ()), *run.get("models", ())) if row["problem"]]:
        raise ValueError(f"{path} has {len(problems)} rows without figures, such as {problems[0]!r}: run it again")
    return run


def tables() -> dict[Path, dict[str, str]]:
    """The tables of each page, by the name of their marks."""
    front_report, avx2_report = front_reports = [load(name) for name in FRONT_RUNS]
    return {
        DOCS / "performance.md": {
            "deit": deit_table(),
            "models": models_table(),
            "scan": scan_table(),
            "precision": precision_table(),
            "runs": "\n".join(run_line(load(name)) for name in CPU_RUNS),
        },
        DOCS / "performance" / "front.md": {
            "ranges": markdown(front_ranges(front_reports)),
            "front": markdown(front.summary(front_cells(front_report))),
            "AVX2": markdown(front.summary(front_cells(avx2_report))),
            **{title: markdown(front.latencies(front_report, [V2, *names])) for title, names in front.CLASSES.items()},
            "gaps": front_gaps(front_report),
        },
        DOCS / "performance" / "gpu.md": {"gpu scans": gpu_scan_table(), "gpu models": gpu_model_table()},
        DOCS / "export.md": {"weights": weights_table()},
    }


def extent(values: Iterable[float | None]) -> str:
    """The smallest and the largest value, such as "0.10 to 0.13"; one figure if they agree; "-" without any."""
    found = [value for value in values if value is not None]
    return " to ".join(dict.fromkeys(figure(end) for end in (min(found), max(found)))) if found else "-"


def cpu_ratios(model: str, size: int, train: bool) -> list[float]:
    """Times of a model divided by those of DeiT-Ti, one of each run on a CPU that timed both."""
    found = []
    for name in CPU_RUNS if model != V2 else V2_RUNS:
        models = by(load(name)["models"], "model", "size")
        found.append(ratio(models.get((model, size, train)), models.get((DEIT, size, train))))
    if not train:
        for rows in (rows for name in FRONT_RUNS for rows in front_cells(load(name), form="eager").values()):
            ours, theirs = (
                next((row for row in rows if (row["model"], row["size"]) == (name, size) and row["ms"]), None)
                for name in (model, DEIT)
            )
            if ours and theirs and ours["run"] == theirs["run"]:
                found.append(median(ours) / median(theirs))
    return [value for value in found if value is not None]


def front_cells(report: Run, form: str | None = None) -> dict[tuple[int, ...], list[Run]]:
    """The rows of front.py by size, batch and threads; those of one form, or of all that front.py has today."""
    cells: dict[tuple[int, ...], list[Run]] = {}
    for row in report["rows"]:
        if row["form"] == form or form is None and row["form"] in front.FORMS:
            cells.setdefault((row["size"], row["batch"], row["threads"]), []).append(row)
    return cells


def front_ranges(reports: Iterable[Run]) -> list[dict[str, str]]:
    """The time of `vilonghornv2_tiny` divided by that of the fastest model of each class, ranges over all cells.

    Args:
        reports: those of FRONT_RUNS.
    """
    lines, cells = [], [front_cells(report).values() for report in reports]
    for int8, (title, names) in product((False, True), front.CLASSES.items()):
        runs = [[pair[0] for rows in run if (pair := front.rival(rows, names, int8))] for run in cells]
        every = sum(runs, [])
        lines.append(
            {
                "precision": "int8" if int8 else "float32",
                "class": f"{title}%",
                "ratio": extent(every),
                **{processor: extent(found) for processor, found in zip(FRONT_RUNS.values(), runs)},
                "slower in": f"{sum(value > 1 for value in every)} of {len(every)}",
            }
        )
    return lines


def front_gaps(report: Run) -> str:
    """The rivals that were not timed, and what failed, in Markdown."""
    untimed = [f"`{name}`" for name in front.RIVALS if not any(row["model"] == name for row in report["rows"])]
    failed = {f"`{row['model']}`, {row['form']}: `{row['problem']}`" for row in report["rows"] if row["problem"]}
    said = [f"Not timed yet, so the ratios to their class may be too low: {', '.join(untimed)}."] if untimed else []
    return "\n\n".join([*said, *sorted(failed)]) or "All models of the pool were timed."


def deit_table() -> str:
    """Times of the tiny models divided by those of DeiT-Ti, the range over the runs."""
    lines = []
    for model in (V2, TINY, "vim_tiny"):
        for train, step in STEPS.items():
            cells = {f"{size} px": extent(cpu_ratios(model, size, train)) for size in SIZES}
            lines.append({"model": f"`{model}`", "step": step} | cells)
    return markdown(lines)


def models_table() -> str:
    """Times and memory of all models of the run of the plot."""
    lines: dict[tuple[str, int], dict[str, str]] = {}
    for (name, size, train), row in by(load(V2_RUN)["models"], "model", "size").items():
        line = lines.setdefault((name, size), {"px": str(size), "batch": str(row["batch"]), "model": f"`{name}`"})
        line[f"{STEPS[train]}, ms"] = figure(median(row), 1)
        if train:
            line["peak memory, GB"] = figure(row["memory_gb"])
    return markdown(list(lines.values()))


def scan_table() -> str:
    """The scan of a CPU beside the loop in torch and the roofline, by rule, in the two runs that timed it."""
    runs = [[line for line in scan_lines(load(name)["scan"]) if line["backend"] == "cpu"] for name in CPU_RUNS[:2]]
    names = {
        f"{step}: {what}": f"{step}, {what}" for step in STEPS.values() for what in ("ms", "times faster than the loop")
    }
    return markdown(
        [
            {"rule": f"`{found[0]['rule']}`"}
            | {title: " / ".join(line[name] for line in found) for name, title in names.items()}
            for found in zip(*runs)
        ]
    )


def precision_table() -> str:
    """Times of `vilonghorn_tiny` divided by those of DeiT-Ti in the same run, by the precision of products."""
    lines = []
    for size in SIZES:
        line = {"px": str(size)}
        for precision in ("highest", "high"):
            models = by(load(f"v2-{precision}")["models"], "model", "size")
            ratios = (ratio(models[TINY, size, train], models[DEIT, size, train]) for train in STEPS)
            line[precision] = " / ".join(map(figure, ratios))
        lines.append(line)
    return markdown(lines)


def run_line(run: Run) -> str:
    """A run: its file, date, machine and command, which was `vilonghorn bench` in the older ones."""
    found, command = run["machine"], shlex.join(run["command"]).partition(" --json")[0]
    command = re.sub("^vilonghorn bench( models)?", "python benchmarks/models.py", command)
    return (
        f"- [{run['file']}](../benchmarks/results/{run['file']}): {found['cpu']}, {found['cores']} cores, "
        f"{run['date'][:10]}, torch {found['torch']}, `{command}`"
    )


def gpu_model_table() -> str:
    """Steps captured in CUDA graphs on a GPU, and their ratio to the DeiT of the same run and size."""
    lines = []
    for name in GPU_RUNS:
        run = load(f"gpu/{name}")
        size, batch = (run["command"][run["command"].index(option) + 1] for option in ("--size", "--batch"))
        for model in (V2, TINY, "vim_tiny", "vilonghornv2_small"):
            deit = f"deit_{'small' if 'small' in model else 'tiny'}_patch16_224, captured"
            if deit in run[STEPS[False]] and f"{model}, captured" in run[STEPS[False]]:
                line = {"model": f"`{model}`", "px": size, "batch": batch}
                for step in STEPS.values():
                    ours, theirs = run[step][f"{model}, captured"], run[step][deit]
                    line |= {f"{step}, ms": figure(median(ours)), f"{step}, to DeiT": figure(ratio(ours, theirs))}
                lines.append(line)
    return markdown(lines)


def gpu_scan_table() -> str:
    """The scans of one direction on a GPU, and the ratio of Mamba's rule to the kernel of its authors."""
    run, lines = load("gpu/peers"), []
    titles = {"triton chunks": "Triton, chunks of heads", "cuda": "CUDA", "mamba_ssm": "`mamba_ssm`"}
    for name in run[STEPS[False]]:
        rule, backend = name.split(", ")
        line = {"rule": f"`{rule}`", "kernel": titles[backend]}
        for step in STEPS.values():
            line[f"{step}, ms"] = f"{median(run[step][name]):.3f}"
            peer = run[step]["mamba, mamba_ssm"] if rule == "mamba" else None
            line[f"{step}, to `mamba_ssm`"] = figure(ratio(run[step][name], peer))
        lines.append(line)
    return markdown(lines)


def weights_table() -> str:
    """Size and top-1 of exported files, a line for each run and format."""
    report, lines = load("export_weights"), []
    for run, kind in dict.fromkeys((row["run"], row["kind"]) for row in report["files"]):
        same = {row["weights"]: row for row in report["files"] if (row["run"], row["kind"]) == (run, kind)}
        line = {"weights of": f"{run} ({same['fp32']['images']} images)", "`--to`": f"`{kind}`"}
        line |= {f"{weights}, MB": f"{row['bytes'] / 1e6:.2f}" for weights, row in same.items()}
        lines.append(line | {f"{weights}, top-1": f"{row['top1']:.2f}" for weights, row in same.items()})
    return markdown(lines)


def claims() -> dict[str, str]:
    """The figures that the README may have, as the range over all runs; times divided by those of the other."""
    found = {}
    for train, step in ((False, "inference"), (True, "training")):
        for size in (224, 1024):
            name = f"{step} of {V2} on a CPU, {size} px, to DeiT-Ti"
            found[name] = extent(cpu_ratios(V2, size, train))
        every = [value for size in SIZES for value in cpu_ratios(V2, size, train)]
        found[f"{step} of {V2} on a CPU, all sizes, to DeiT-Ti"] = extent(every)
    for size in SIZES:
        rows = load(f"gpu/models-{size}")[STEPS[True]]
        found[f"training of {V2} on an H100, {size} px, to DeiT-Ti"] = figure(
            ratio(rows[f"{V2}, captured"], rows[f"{DEIT}, captured"])
        )
    for line in front_ranges(map(load, FRONT_RUNS)):
        name = f"inference of {V2} in onnxruntime, {line['precision']}, to the fastest of {line['class']}"
        found[name] = line["ratio"]
    peers = load("gpu/peers")
    scans = (ratio(peers[step]["mamba, cuda"], peers[step]["mamba, mamba_ssm"]) for step in STEPS.values())
    return found | {"scan of Mamba's rule on an H100, forward and with backward, to mamba_ssm": extent(scans)}


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


def main(argv: Sequence[str] = ()) -> int:
    """Writes the pages and the plots; returns the exit status."""
    if argv:
        sys.exit(__doc__)
    for path, contents in tables().items():
        write_page(path, contents)
    draw(DOCS / "performance" / "speed.svg", load(V2_RUN))
    front.draw(DOCS / "performance" / "front.svg", load("front"))
    print("\n".join(f"{name}: {figures}" for name, figures in claims().items()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
