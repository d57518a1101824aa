"""The plots of a study: test accuracy along the axis of each table."""

from pathlib import Path

from matplotlib import colormaps, rc_context
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from ..data.files import atomic_write
from .results import Report, interval
from .tables import METRICS, participants

COLOURS = [to_hex(colormaps["tab20"](i)) for i in (*range(0, 20, 2), *range(1, 20, 2))]  # saturated ones first


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
    """The colour of a candidate in all plots of its study."""
    return COLOURS[list(report.plan.candidates).index(candidate) % len(COLOURS)]


def table_figure(report: Report, table: str) -> Figure:
    """Mean and standard deviation over seeds; a line for each candidate."""
    plan = report.plan.tables[table]
    figure = Figure(figsize=(7.5, 4.6), layout="constrained")
    axes = figure.subplots()
    for name in participants(report, table):
        values = [(x, list(report.accuracies(task, test, name, plan.metric).values())) for task, test, x in plan.points]
        found = sorted((x, interval(accuracies)) for x, accuracies in values if accuracies)
        if found:
            x, mean, std = zip(*((x, v.mean, v.std if v.count > 1 else 0) for x, v in found))
            look = dict(color=colour(report, name), marker="o", ms=4, capsize=2)
            axes.errorbar(x, mean, std, label=report.title(name), **look)
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
