"""The plots of a study: test accuracy along the axis of each table, and validation accuracy while images are seen."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..data.files import replacing
from .stats import Report, accuracies, contenders, counted, interval
from .tables import points, taking_part, titles


def draw(report: Report, folder: Path) -> list[Path]:
    """Draws all plots as `folder/STUDY-NAME.svg`; returns the files."""
    named = {name: table_figure(report, name) for name in report["plan"]["tables"]} | {"curves": curves_figure(report)}
    files = []
    for name, figure in named.items():
        files.append(folder / plot_file(report, name))
        # Equal figures make equal files.
        with rc_context({"svg.hashsalt": "vilonghorn"}), replacing(files[-1]) as file:
            figure.savefig(file, format="svg", metadata={"Date": None})
    return files


def plot_file(report: Report, name: str) -> str:
    """The name of the plot of a table, or of the "curves"."""
    return f"{report['study']}-{name}.svg"


def colour(report: Report, name: str) -> str:
    """The same for a contender in all plots."""
    return f"C{list(report['plan']['contenders']).index(name)}"


def table_figure(report: Report, table: str) -> Figure:
    """Means over seeds, bars of one standard deviation; a line for each contender and, of several, task."""
    plan = report["plan"]["tables"][table]
    figure = Figure(figsize=(7.5, 4.6), layout="constrained")
    axes = figure.subplots()
    along = sorted({x for _, _, x in points(report, table)})
    lines: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    for name in taking_part(report, table):
        for task, test, x in points(report, table):
            values = list(accuracies(report, task, test, name).values())
            if values:
                found = interval(values)
                lines.setdefault((name, series(report, table, task)), []).append((x, found.mean, found.spread))
    kinds = list(dict.fromkeys(kind for _, kind in lines))
    for (name, kind), found in lines.items():
        x, mean, spread = zip(*sorted(found))
        label = titles(report)[name] + (f", {kind}" if len(kinds) > 1 else "")
        spread = [0 if math.isnan(value) else value for value in spread]
        style = ("-", "--", ":", "-.")[kinds.index(kind) % 4]
        axes.errorbar(x, mean, spread, label=label, color=colour(report, name), marker="o", ls=style, ms=4, capsize=2)
    if plan["log"]:
        axes.set_xscale("log", base=2)
        axes.set_xticks(along, [f"{x:g}" for x in along])
        axes.minorticks_off()
    axes.set(title=plan["title"], xlabel=plan["axis"], ylabel="test top-1, %")
    finish(axes)
    return figure


def series(report: Report, table: str, task: str) -> str:
    """The line that a task's points belong to: tasks that differ along the axis only make one."""
    own = [x for other, _, x in points(report, table) if other == task]
    return task if len(own) > 1 else ""


def curves_figure(report: Report) -> Figure:
    """Validation accuracy against training images seen, a panel for each task, the mean over the seeds."""
    tasks = list(report["plan"]["tasks"])
    columns = min(3, len(tasks))
    rows = -(-len(tasks) // columns)
    figure = Figure(figsize=(4.6 * columns, 3.6 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, task in zip(panels, tasks):
        for name in contenders(report, task):
            curves = [cell["curve"] for cell in counted(report, task, name).values()]
            if curves:
                seen = [point["images"] for point in curves[0]]
                mean = [statistics.fmean(point["top1"] for point in column) for column in zip(*curves)]
                axes.plot(seen, mean, label=titles(report)[name], color=colour(report, name), marker=".")
        axes.set(title=task, xlabel="training images seen", ylabel="validation top-1, %")
        axes.set_ylim(0, 101)
        axes.grid(alpha=0.3)
    for axes in panels[len(tasks) :]:
        axes.set_axis_off()
    handles = {line.get_label(): line for axes in figure.axes for line in axes.get_lines()}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, fontsize="small")
    return figure


def finish(axes: Axes) -> None:
    """Scale, grid and legend."""
    axes.set_ylim(0, 101)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, ncols=2)
