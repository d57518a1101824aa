"""Makes docs/performance.md from runs of the benchmark: `python docs/performance/make.py`, in the root of a checkout.

Figures come from docs/performance/cpu-*.json, which `python -m vilonghorn.bench --json` writes, v2*.json, kernels.json
and gpu.json; the text from text.md beside them, in which $names stand for tables. Also draws models.svg and speed.svg,
and writes the tables of README.md and docs/choosing.md.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from string import Template
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from vilonghorn.bench import report as bench
from vilonghorn.bench.candidates import FAMILIES, LOOP, STEPS
from vilonghorn.data.files import atomic_write
from vilonghorn.engine.markdown import fill_page, markdown

PAGE, FOLDER, README = Path("docs/performance.md"), Path("docs/performance"), Path("README.md")
CHOOSING = Path("docs/choosing.md")
TABLES = {README: "speed", CHOOSING: "ratios"}
PLOT, SPEED_PLOT = FOLDER / "models.svg", FOLDER / "speed.svg"
# Instructions of the authors' own kernels, counted in the same way: forward, backward.
OFFICIAL = {("longhorn", 90): (1050, 2000), ("mamba", 90): (871, 1790)}


def page(folder: Path) -> str:
    """The text of docs/performance.md.

    Args:
        folder: with text.md and the files of figures.
    """
    runs = load_runs(folder)
    names = ("kernels", "gpu", "v2", "v2-highest", "v2-high")
    kernels, gpu, v2, highest, high = (json.loads((folder / f"{name}.json").read_text()) for name in names)
    verdicts = list(zip(*([target["verdict"] for target in bench.targets(run)] for run in runs)))
    return Template((folder / "text.md").read_text()).substitute(
        machines="\n".join(f"{i}. {machine(run)}" for i, run in enumerate(runs, 1)),
        met=f"{sum(set(same) == {'met'} for same in verdicts)} of {len(verdicts)}",
        speed=speed_table(runs, v2),
        targets=merge([bench.target_lines(run) for run in runs], 2),
        scan=scan_tables(runs),
        models=merge([bench.model_lines(run) for run in runs], 3),
        v2=markdown(bench.model_lines(v2)),
        v2_to_first=v2_to_first(v2),
        v2_machine=machine(v2 | dict(file="v2.json")),
        precision=precision_table({"highest": highest, "high": high}),
        highest_machine=machine(highest | dict(file="v2-highest.json")),
        high_machine=machine(high | dict(file="v2-high.json")),
        profiled="batch {batch}, {size} px, {ms:.0f} ms a step under the profiler".format(**runs[0]["profile"]),
        profile=markdown(bench.profile_lines(runs[0]["profile"])),
        instructions=kernel_table(kernels, "instructions", OFFICIAL),
        registers=kernel_table(kernels, "registers"),
        **{f"gpu_{name}": markdown(lines) for name, lines in gpu.items()},
        compilers=f"nvcc {kernels['nvcc']}, Triton {kernels['triton']}",
    )


def load_runs(folder: Path) -> list[dict[str, Any]]:
    """The finished runs cpu-*.json of a folder in order, each with `file`, its name.

    Raises:
        ValueError: a run was interrupted, or leaves out a subject.
    """
    runs = []
    for path in sorted(folder.glob("cpu-*.json")):
        run = json.loads(path.read_text())
        missing = [subject for subject in ("scan", "models", "profile") if not run.get(subject)]
        if missing or not run["finished"]:
            what = f"lacks {', '.join(missing)}" if missing else "did not finish"
            raise ValueError(f"{path} {what}: run python -m vilonghorn.bench --json {path} again")
        runs.append(run | dict(file=path.name))
    return runs


def machine(run: dict[str, Any]) -> str:
    """A run: its file, machine and command."""
    found, minutes = run["machine"], sum(run["seconds"].values()) / 60
    return (
        f"[{run['file']}](performance/{run['file']}), {run['date'][:10]}: {found['cpu']}, {found['threads']} threads "
        f"on {found['cores']} cores, load {found['load']:.2f} before the start, Python {found['python']}, torch "
        f"{found['torch']}, timm {found['timm']}; {minutes:.0f} min: `{shlex.join(run['command'])}`"
    )


def merge(tables: Sequence[Sequence[bench.Line]], num_keys: int) -> str:
    """The table of all runs from the table of each: cells of every run, "-" where it has no such line.

    Args:
        tables: lines of each run.
        num_keys: how many of the first columns name a line. These are shown once.
    """
    runs = [{tuple(line.values())[:num_keys]: line for line in lines} for lines in tables]
    columns = list(dict.fromkeys(column for lines in tables for line in lines for column in line))
    merged = []
    for key in dict.fromkeys(key for run in runs for key in run):
        figures = {name: join(run[key][name] if key in run else "-" for run in runs) for name in columns[num_keys:]}
        merged.append(dict(zip(columns, key)) | figures)
    return markdown(merged)


def join(figures: Iterable[str]) -> str:
    """A figure of each run."""
    return " / ".join(figures)


def scan_tables(runs: Sequence[dict[str, Any]]) -> str:
    """The scans of all runs, by workload."""
    tables = [bench.scan_lines(run) for run in runs]
    workloads = dict.fromkeys(workload for table in tables for workload in table)
    merged = {name: merge([table.get(name, []) for table in tables], 3) for name in workloads}
    return "\n\n".join(f"{name}:\n\n{table}" for name, table in merged.items())


def speed_table(runs: Sequence[dict[str, Any]], v2: dict[str, Any]) -> str:
    """The scan against the torch loop, the models against DeiT; the second family of a run of its own."""
    scans = [bench.by(run["scan"], "rule", "backend") for run in runs]
    models = [bench.by(run["models"], "model", "size") for run in runs]
    lines = []
    for rule in ("longhorn", "longhorn_exact"):
        line = {" ": f"scan, `{rule}`", "compared to": "the usual loop in torch"}
        for train, step in STEPS.items():
            faster = (bench.ratio(scan.get((rule, LOOP, train)), scan.get((rule, "cpu", train))) for scan in scans)
            line[step] = f"{join(bench.figure(value, 0) for value in faster)} times faster"
        lines.append(line)
    for family, found in (("vilonghorn", models), ("vilonghornv2", [bench.by(v2["models"], "model", "size")])):
        lines += [to_deit(f"{family}_tiny", bench.DEIT_TINY, size, found) for size in (224, 512, 1024)]
        lines.append(to_deit(f"{family}_small", bench.DEIT_SMALL, 224, found))
    return markdown(lines)


def to_deit(ours: str, theirs: str, size: int, models: Sequence[dict[tuple, dict[str, Any]]]) -> bench.Line:
    """The time of a model to that of DeiT, a figure of each run."""
    line = {" ": f"`{ours}`, {size} px", "compared to": f"timm's `{theirs}`"}
    for train, step in STEPS.items():
        ratios = (bench.ratio(run.get((ours, size, train)), run.get((theirs, size, train))) for run in models)
        line[step] = f"{join(map(bench.figure, ratios))} times its time"
    return line


def precision_table(runs: dict[str, dict[str, Any]]) -> str:
    """Time of each model to that of DeiT in the same run, forward / with backward, by the precision of the products."""
    lines: dict[tuple[str, int], bench.Line] = {}
    first = {name: family[0] for family in FAMILIES for name in family}
    for precision, run in runs.items():
        models = bench.by(run["models"], "model", "size")
        for name, size in dict.fromkeys((row["model"], row["size"]) for row in run["models"]):
            ratios = (bench.ratio(models.get((name, size, t)), models.get((first[name], size, t))) for t in STEPS)
            if first[name] != name:
                line = lines.setdefault((name, size), {"px": f"{size}", "model": f"`{name}`"})
                line[precision] = join(bench.figure(value, bold_above=1) for value in ratios)
    return markdown(list(lines.values()))


def v2_to_first(run: dict[str, Any]) -> str:
    """Time of the second family to that of the first, forward and with backward."""
    models, parts = bench.by(run["models"], "model", "size"), []
    for size in dict.fromkeys(row["size"] for row in run["models"]):
        for kind in ("tiny", "small"):
            rows = [[models.get((f"{f}_{kind}", size, t)) for f in ("vilonghornv2", "vilonghorn")] for t in STEPS]
            if all(map(all, rows)):
                forward, train = (bench.figure(bench.ratio(*pair)) for pair in rows)
                parts.append(f"{forward} / {train} ({kind}, {size} px)")
    return ", ".join(parts)


def kernel_table(
    kernels: dict[str, Any], key: str, official: dict[tuple[str, int], tuple[int, int]] | None = None
) -> str:
    """A count of every compiled GPU kernel that runs bfloat16 with 16 states, by rule and architecture."""
    lines: dict[tuple[str, int], dict[str, str]] = {}
    for row in sorted(kernels["rows"], key=lambda row: (row["backend"], row["kernel"] != "forward")):
        known = row["kernel"] in ("forward", "backward") and key in row and row.get("states", 16) == 16
        if known and row["dtype"] in ("bfloat16", "bf16"):
            rule, architecture = row["rule"], row["architecture"]
            line = lines.setdefault((rule, architecture), {" ": f"{rule}, sm_{architecture}"})
            column = f"{row['backend']} {row['kernel']}"
            line[column] = str(max(row[key], int(line.get(column, 0))))
    for cell, counts in (official or {}).items():
        lines[cell] |= {f"official {kernel}": str(n) for kernel, n in zip(("forward", "backward"), counts)}
    return markdown([lines[cell] for cell in sorted(lines, key=lambda cell: (cell[1], cell[0]))])


def ratio_table(runs: Sequence[dict[str, Any]]) -> str:
    """vilonghorn_tiny against DeiT-Ti at every size of both: time and peak memory."""
    models = [bench.by(run["models"], "model", "size") for run in runs]
    columns = {f"time, {step}": (train, "ms") for train, step in STEPS.items()} | {"memory": (True, "memory_gb")}
    lines = []
    for size in sorted({size for name, size, _ in models[0] if name == bench.TINY}):
        line = {"px": f"{size}", "patches": f"{(size // 16) ** 2:,}"}
        for column, (train, key) in columns.items():
            pairs = ((run.get((name, size, train)) for name in (bench.TINY, bench.DEIT_TINY)) for run in models)
            line[column] = join(bench.figure(bench.ratio(*pair, key), bold_above=1) for pair in pairs)
        lines.append(line)
    return markdown(lines)


def fill(text: str, name: str, folder: Path) -> str:
    """A page with the table `name` of the runs, "speed" or "ratios", between its marks."""
    runs, v2 = load_runs(folder), json.loads((folder / "v2.json").read_text())
    found = runs[0]["machine"]
    made = f"{found['cpu']}, {found['threads']} threads, float32, a figure of each of {len(runs)} runs:\n\n"
    return fill_page(text, name, made + (speed_table(runs, v2) if name == "speed" else ratio_table(runs)))


def draw_models(path: Path, run: dict[str, Any]) -> None:
    """Draws time and peak memory of an image against its pixels, as SVG."""
    rows = sorted((row for row in run["models"] if row["ms"]), key=lambda row: row["size"])
    figure = Figure(figsize=(11, 8), layout="constrained")
    grid = figure.subplots(2, 2, squeeze=False)
    for (time, memory), train in zip(grid.T, STEPS):
        for model, compiled in dict.fromkeys((row["model"], row["compiled"]) for row in rows):
            own = [row for row in rows if (row["model"], row["compiled"], row["train"]) == (model, compiled, train)]
            pixels, label = [row["size"] ** 2 for row in own], model + ", compiled" * compiled
            time.plot(pixels, [bench.median(row) / row["batch"] for row in own], marker=".", label=label)
            memory.plot(pixels, [(row["memory_gb"] or math.nan) / row["batch"] for row in own], marker=".")
        time.set(title=STEPS[train], ylabel="time of an image, ms")
        memory.set(ylabel="peak memory of an image, GB")
    for axes in grid.flat:
        axes.set(xscale="log", yscale="log", xlabel="pixels of an image")
        axes.grid(alpha=0.3, which="both")
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")
    figure.suptitle(plot_title(run))
    save_svg(figure, path)


def draw_speed(path: Path, run: dict[str, Any]) -> None:
    """Draws seconds of an image against its side, for vilonghorn_tiny and DeiT-Ti, as SVG."""
    figure = Figure(figsize=(8, 3), layout="constrained")
    for axes, (train, step) in zip(figure.subplots(1, 2), STEPS.items()):
        for name, color in ((bench.DEIT_TINY, "tab:gray"), (bench.TINY, "tab:orange")):
            rows = [row for row in run["models"] if (row["model"], row["train"]) == (name, train) and row["ms"]]
            rows.sort(key=lambda row: row["size"])
            seconds = [bench.median(row) / row["batch"] / 1e3 for row in rows]
            axes.plot([row["size"] for row in rows], seconds, marker=".", color=color, label=name)
        axes.set(title=step, xlabel="height and width of the image, pixels", ylabel="seconds per image", ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.suptitle(plot_title(run), fontsize="medium")
    save_svg(figure, path)


def save_svg(figure: Figure, path: Path) -> None:
    """Writes a figure; equal figures make equal files."""
    with rc_context({"svg.hashsalt": "vilonghorn"}), atomic_write(path) as file:
        figure.savefig(file, format="svg", metadata={"Date": None})


def plot_title(run: dict[str, Any]) -> str:
    """The title of the plot: machine, threads and date."""
    found = run["machine"]
    return f"{found.get('gpu', found['cpu'])}, {found['threads']} threads, {run['date'][:10]}"


def main() -> int:
    """Writes the page, the plots and the tables of other pages; returns the exit status."""
    if not (FOLDER / "text.md").is_file():
        sys.exit(f"error: there is no {FOLDER / 'text.md'} here: run it in the root of a checkout")
    try:
        texts = {PAGE: page(FOLDER)} | {path: fill(path.read_text(), name, FOLDER) for path, name in TABLES.items()}
    except ValueError as error:
        sys.exit(f"error: {error}")
    for path, text in texts.items():
        with atomic_write(path, "w") as file:
            file.write(text)
    run = load_runs(FOLDER)[0]
    draw_models(PLOT, run)
    draw_speed(SPEED_PLOT, run)
    return 0


if __name__ == "__main__":
    sys.exit(main())
