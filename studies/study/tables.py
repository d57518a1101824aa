"""The tables of a study in Markdown, and its plots; every figure comes from its report."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from page_tables import markdown

from vilonghorn.data.atomic_files import atomic_write

from .plan import Table
from .results import Interval, Report, choose_rate, interval, mean_validation, sweep_runs

NONE = "–"
METRICS = {"top1": "top-1", "top5": "top-5"}
LEVEL = 0.05  # of significance
MOST_LINES = 6  # of a plot


def render(report: Report) -> str:
    """All tables of a study, with headings and the plots that `draw` leaves."""
    parts = [f"{report.plan.title} {summary(report)}"]
    for name, table in report.plan.tables.items():
        picture = f"![{table.title}]({report.study}-{name}.svg)"
        parts += [f"### {table.title}", picture, scores(report, name), differences(report, name)]
    parts += ["### Learning rates", rates(report)]
    return "\n\n".join(parts)


def summary(report: Report) -> str:
    """What was run, where, and by which command."""
    plan, trained = report.plan, [cell for cell in report.cells if "val" in cell]
    lines = [f"`python studies/study {report.study}`, {report.date[:10]}, {report.machine['cpu']}:"]
    if trained:
        sizes, hours = [cell["parameters"] for cell in trained], sum(cell["seconds"] for cell in trained) / 3600
        lines.append(
            f"{len(trained)} training runs, {hours:.1f} hours in total, one thread each; models of {min(sizes):,} to "
            f"{max(sizes):,} parameters; seeds {listed(plan.seeds)}, for the learning rates {listed(plan.sweep_seeds)}."
        )
    diverged = [f"{c['candidate']} on {c['task']}, seed {c['seed']}" for c in report.cells if "diverged" in c]
    if diverged:
        lines.append(f"Diverged and left out: {'; '.join(diverged)}.")
    if not report.finished:
        lines.append("**The study is not finished: these are partial results.**")
    commits = sorted({re.sub(r"(?<=^\w{10})\w+", "", cell["commit"] or "none") for cell in trained})
    lines.append(f"Commit {listed(commits)} (+: with uncommitted changes).")
    return " ".join(lines)


def listed(values: Iterable[Any]) -> str:
    """Values with commas."""
    return ", ".join(map(str, values))


def participants(report: Report, table: str) -> list[str]:
    """The candidates of a table, in the order of the study."""
    tasks = {task for task, _, _ in report.plan.tables[table].points}
    return [name for name in report.plan.candidates if any(name in report.plan.names(task) for task in tasks)]


def columns(report: Report, table: str) -> list[tuple[str, str, str]]:
    """Heading, task and test set of each point."""
    plan = report.plan.tables[table]
    return [(f"{plan.axis} {x:g}", task, test) for task, test, x in plan.points]


def scores(report: Report, table: str) -> str:
    """Mean and standard deviation of test accuracy in percent, and chance."""
    metric, points, rows = report.plan.tables[table].metric, columns(report, table), []
    head = f"test {METRICS[metric]}, %"
    for name in participants(report, table):
        texts = {column: score(report, task, test, name, metric) for column, task, test in points}
        if set(texts.values()) != {NONE}:
            rows.append({head: report.title(name), **texts})
    chance = {head: "chance"}
    for column, task, test in points:
        if tested := [cell["tests"] for cell in report.cells if cell["task"] == task and cell["tests"]]:
            guesses = 1 if metric == "top1" else 5
            chance[column] = f"{min(100.0, guesses * tested[0][test]['chance']):.1f}"
    return markdown([*rows, chance])


def score(report: Report, task: str, test: str, candidate: str, metric: str = "top1") -> str:
    """Mean and standard deviation of a test accuracy in percent; their number where not all seeds of the study ran."""
    plan = report.plan
    planned = candidate in plan.names(task) and test in plan.tasks[task].tests
    accuracies = report.accuracies(task, test, candidate, metric) if planned else {}
    if not accuracies:
        return NONE
    count, wanted = len(accuracies), len(plan.seeds)
    text = mean_and_deviation(list(accuracies.values()))
    return text + (f" ({count} of {wanted} seeds)" if count != wanted else "")


def mean_and_deviation(values: Sequence[float]) -> str:
    """Mean and standard deviation; of one value the mean alone."""
    found = interval(values)
    return f"{found.mean:.1f}" + (f" ± {found.std:.1f}" if found.count > 1 else "")


def differences(report: Report, table: str) -> str:
    """Paired differences from the reference; bold where Holm's p-value, for all tables, is below 0.05."""
    rows, reference, points = [], report.plan.reference, columns(report, table)
    adjusted, metric = report.adjusted(), report.plan.tables[table].metric
    for name in (name for name in participants(report, table) if name != reference):
        texts = {
            column: difference(
                report.difference(task, test, name, metric), adjusted.get((task, test, name, metric), 1.0) < LEVEL
            )
            for column, task, test in points
        }
        if set(texts.values()) != {NONE}:
            rows.append({f"minus {report.title(reference)} [95% interval]": report.title(name), **texts})
    return markdown(rows) if rows else "No differences: only one candidate has run."


def difference(found: Interval | None, significant: bool) -> str:
    """A mean difference with its confidence interval; bold if it is significant."""
    if found is None:
        return NONE
    mean, low, high = (f"{value:+.1f}".replace("-0.0", "+0.0") for value in (found.mean, found.low, found.high))
    text = mean + (f" [{low}, {high}]" if found.count > 1 else "")
    return f"**{text}**" if significant else text


def rates(report: Report) -> str:
    """Validation accuracy by learning rate; the chosen one is bold, and marked where it is the first or the last."""
    rows, notes = [], []
    sweeps = {pair: sweep_runs(report.plan, report.cells, *pair) for pair in report.plan.pairs()}
    tried = sorted({rate for runs in sweeps.values() for rate in runs})
    for (task, name), runs in sweeps.items():
        chosen = choose_rate(report.plan, report.cells, task, name)
        if runs:
            row = {"validation top-1, %: task of the plan, model": f"{task}, {report.title(name)}"}
            rows.append(row | dict.fromkeys((f"{rate:g}" for rate in tried), ""))
        for rate, cells in runs.items():
            diverged = any("diverged" in cell for cell in cells)
            text = "diverged" if diverged else f"{mean_validation(cells, 'top1'):.1f}" if cells else NONE
            if rate == chosen:
                text = f"**{text}**"
                if len(runs) > 1 and rate in (min(runs), max(runs)):
                    text += " (edge)"
                    notes = ["Edge: the chosen rate is the smallest or the largest tried; a better one may lie beyond."]
            rows[-1][f"{rate:g}"] = text
    return "\n\n".join([markdown(rows), *notes])


def draw(report: Report, table: str, folder: Path) -> Path:
    """Draws the plot of a table as `folder/STUDY-TABLE.svg`, equal files for equal results; returns the file."""
    return save_svg(figure(report, table), folder / f"{report.study}-{table}.svg")


def save_svg(picture: Figure, path: Path) -> Path:
    """Writes a figure as SVG, its text as text, and returns the file; figures that are equal give equal files."""
    with rc_context({"svg.hashsalt": "vilonghorn", "svg.fonttype": "none"}), atomic_write(path) as file:
        picture.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return path


def figure(report: Report, table: str) -> Figure:
    """Mean and standard deviation over seeds along the axis of a table: a line for each candidate in one plot.

    More than `MOST_LINES` candidates have a plot each, beside the reference in gray.
    """
    plan, reference = report.plan.tables[table], report.plan.reference
    lines = {name: line for name in participants(report, table) if (line := line_of(report, plan, name))}
    small = len(lines) > MOST_LINES
    panels = [name for name in lines if name != reference] if small else [reference]
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(7, 1.1 + 1.9 * rows if small else 4.6), layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    for axes, panel in zip(grid, panels):
        for number, (name, line) in enumerate(lines.items()):
            if not small or name in (panel, reference):
                color = "0.6" if small and name == reference else f"C{0 if small else number}"
                axes.errorbar(*line, label=report.title(name), color=color, marker="o", ms=4, capsize=2)
        if plan.log:
            along = sorted({x for _, _, x in plan.points})
            axes.set_xscale("log", base=2)
            axes.set_xticks(along, [f"{x:g}" for x in along])
            axes.minorticks_off()
        axes.set_ylim(0, 101)
        axes.grid(alpha=0.3)
        if small:
            axes.set_title(fill(report.title(panel), 30), fontsize=9)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    figure.suptitle(fill(plan.title, 60) + (f"\n(gray: {report.title(reference)})" if small else ""), fontsize=12)
    figure.supylabel(f"test {METRICS[plan.metric]}, %, mean and std of seeds", fontsize=10)
    if small:
        figure.supxlabel(plan.axis, fontsize=10)
    else:
        axes.set_xlabel(plan.axis)
    if lines and not small:
        figure.legend(*grid[0].get_legend_handles_labels(), loc="outside lower center", ncols=min(4, len(lines)))
    return figure


def line_of(report: Report, plan: Table, candidate: str) -> tuple[Sequence[float], ...]:
    """Positions, means and standard deviations of a candidate's test accuracy; empty without results."""
    found = []
    for task, test, x in plan.points:
        if accuracies := report.accuracies(task, test, candidate, plan.metric):
            found.append((x, interval(list(accuracies.values()))))
    found.sort()
    return tuple(zip(*((x, v.mean, v.std if v.count > 1 else 0) for x, v in found)))
