"""The plots of a study: test accuracy along the axis of each table."""

from collections import Counter
from itertools import cycle
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from ..data.files import atomic_write
from .results import Report, interval
from .tables import METRICS, participants

STYLES = ("-", "--", ":", "-.")


def draw(report: Report, folder: Path) -> list[Path]:
    """Draws the plots of all tables as `folder/STUDY-TABLE.svg`; returns the files."""
    return save_figures(report, {name: table_figure(report, name) for name in report.plan.tables}, folder)


def save_figures(report: Report, figures: dict[str, Figure], folder: Path) -> list[Path]:
    """Saves figures by name as `folder/STUDY-NAME.svg`, equal files for equal figures; returns the files."""
    files = [folder / f"{report.study}-{name}.svg" for name in figures]
    with rc_context({"svg.hashsalt": "vilonghorn", "svg.fonttype": "none"}):
        for path, figure in zip(files, figures.values()):
            with atomic_write(path) as file:
                figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return files


def colour(report: Report, candidate: str) -> str:
    """The colour of a candidate in all plots."""
    return f"C{list(report.plan.candidates).index(candidate)}"


def table_figure(report: Report, table: str) -> Figure:
    """Mean and standard deviation over seeds; a line for each candidate and each task with several points."""
    plan = report.plan.tables[table]
    num_points = Counter(task for task, _, _ in plan.points)
    lines: dict[str, list[tuple[str, str, float]]] = {}
    for point in plan.points:
        lines.setdefault(point[0] if num_points[point[0]] > 1 else "", []).append(point)
    figure = Figure(figsize=(7.5, 4.6), layout="constrained")
    axes = figure.subplots()
    for name in participants(report, table):
        for style, (task, points) in zip(cycle(STYLES), lines.items()):
            values = [(x, list(report.accuracies(of, test, name, plan.metric).values())) for of, test, x in points]
            found = sorted((x, interval(accuracies)) for x, accuracies in values if accuracies)
            if found:
                label = report.title(name) + (f", {task}" if task and len(lines) > 1 else "")
                x, mean, std = zip(*((x, v.mean, v.std if v.count > 1 else 0) for x, v in found))
                look = dict(color=colour(report, name), ls=style, marker="o", ms=4, capsize=2)
                axes.errorbar(x, mean, std, label=label, **look)
    if plan.log:
        along = sorted({x for _, _, x in plan.points})
        axes.set_xscale("log", base=2)
        axes.set_xticks(along, [f"{x:g}" for x in along])
        axes.minorticks_off()
    axes.set(title=plan.title, xlabel=plan.axis, ylabel=f"test {METRICS[plan.metric]}, %", ylim=(0, 101))
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7, ncols=2)
    return figure
