"""Makes docs/comparison.md, its plots and the comparison in the README: `python docs/comparison/make.py`.

Figures come from docs/comparison/NAME.json, which `python -m vilonghorn.study NAME --json docs/comparison/NAME.json`
writes; outside.json, cost.json and published.json; and the benchmark's docs/performance/cpu-*.json. The text is
text.md: $NAME stands for a table, ${STUDY/TASK/TEST} for the mean accuracies on a test set, and
${STUDY/TASK/TEST/CANDIDATE/OTHER} for the difference of two candidates.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from vilonghorn.bench.tables import fill_page, markdown
from vilonghorn.data.files import atomic_write
from vilonghorn.study.plots import colour, draw, save_figures
from vilonghorn.study.results import Interval, Report, interval, read_report
from vilonghorn.study.tables import NONE, difference, listed, participants, render, score

ROOT = Path(__file__).parents[2]
FOLDER, PAGE, README = ROOT / "docs" / "comparison", ROOT / "docs" / "comparison.md", ROOT / "README.md"
STUDIES = ("icons", "icons_large", "recall", "v2", "v2_recall", "v2_shape")  # in the order of the page
HEADLINE = ("recall", "long")  # the study and the table that the README shows


def read_reports(folder: Path) -> list[Report]:
    """The committed studies, in the order of the page, which marks those that are not finished."""
    return [read_report(folder / f"{name}.json") for name in STUDIES]


def page(reports: Sequence[Report]) -> str:
    """The text of docs/comparison.md, from the studies and the other JSON files."""
    runs = [load(path) for path in sorted((ROOT / "docs" / "performance").glob("cpu-*.json"))]
    figures = Figures({report.study: report for report in reports})
    figures["studies"] = "\n\n".join(section(report) for report in reports)
    figures["outside"] = outside(load(FOLDER / "outside.json")["runs"], load(FOLDER / "published.json")["figures"])
    figures["unlearned"] = unlearned(figures.reports["recall"])
    figures["larger"] = larger(figures.reports["icons"], figures.reports["icons_large"])
    step = load(FOLDER / "cost.json")
    figures["switches"] = switches(figures.reports["v2"], figures.reports["v2_recall"], step)
    figures["step"] = step_cost(step)
    figures["cost"] = cost(runs)
    return Text((FOLDER / "text.md").read_text(encoding="utf-8")).substitute(figures)


def load(path: Path) -> dict[str, Any]:
    """Reads a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


class Text(Template):
    """A template in which ${...} may have slashes."""

    braceidpattern = r"[\w/]+"


class Figures(dict):
    """What stands for a name in the text; for STUDY/TASK/TEST the mean accuracies of the candidates on a test set; for
    STUDY/TASK/TEST/CANDIDATE/OTHER the difference of two, seed by seed, in points, with its 95% interval. Seeds may
    follow, as in .../1/2/3; without them it is of all that both have.
    """

    def __init__(self, reports: dict[str, Report]) -> None:
        super().__init__()
        self.reports = reports

    def __missing__(self, key: str) -> str:
        study, task, test, *names = key.split("/")
        report = self.reports[study]
        if names:
            ours, theirs = (report.accuracies(task, test, name) for name in names[:2])
            seeds = set(map(int, names[2:])) or set(ours) & set(theirs)
            return difference(interval([ours[seed] - theirs[seed] for seed in sorted(seeds)]), False)
        found = {report.title(name): score(report, task, test, name) for name in report.plan.names(task)}
        return listed(f"{title} {text}%" for title, text in found.items() if text != NONE)


def unlearned(recall: Report) -> str:
    """The runs of each rule on four pairs, at all state sizes, and on six, that ended below 90% on the test."""
    tasks, texts = [*(task for task, _, _ in recall.plan.tables["state"].points), "recall6"], []
    for name in recall.plan.candidates:
        found = [accuracy for task in tasks for accuracy in recall.accuracies(task, "test", name).values()]
        texts.append(f"{recall.title(name)} {sum(accuracy < 90 for accuracy in found)} of {len(found)}")
    return listed(texts)


def larger(icons: Report, large: Report) -> str:
    """Top-1 on icons by their size, a row for each candidate and each training of icons and icons_large."""
    trainings = {
        "64": (icons, "icons"),
        "64, then 128": (large, "icons128"),
        "64, then 64, 96 or 128": (large, "icons_mixed"),
    }
    rows = []
    for name in icons.plan.candidates:
        for sizes, (report, task) in trainings.items():
            texts = {f"{side} pixels": score(report, task, side, name) for side in ("64", "96", "128", "256")}
            if set(texts.values()) != {NONE}:
                rows.append({"candidate": icons.title(name), "trained at, pixels": sizes, **texts})
    return markdown(rows)


def switches(icons: Report, recall: Report, cost: dict[str, Any]) -> str:
    """A row for each candidate of v2 and of v2_recall: top-1 on icons, the difference from the reference, recall at two
    lengths, and the time of a training step to that of the reference, from cost.json.
    """
    reference, task, rows = icons.title(icons.plan.reference), "long4_same_rate", []
    times = {row["candidate"]: statistics.median(row["ms"]) for row in cost["rows"]}
    for name in dict.fromkeys([*icons.plan.candidates, *recall.plan.candidates]):
        title = (icons if name in icons.plan.candidates else recall).title(name)
        on_icons = score(icons, "icons", "64", name)
        found = icons.difference("icons", "64", name) if on_icons != NONE and title != reference else None
        row = {
            "candidate": title,
            "icons, %": on_icons,
            "difference": difference(found, False),
        }
        for length in ("16", "4096"):
            row[f"recall, {int(length):,} tiles, %"] = score(recall, task, length, name)
        row["time of a step"] = f"{times[title] / times[reference]:.2f}" if title in times else NONE
        rows.append(row)
    return markdown(rows)


def section(report: Report) -> str:
    """The tables and plots of a study."""
    parts = [f"## Study `{report.study}`", render(report, "comparison/")]
    if has_curves(report):
        parts += ["### Training images to an accuracy", f"![Curves](comparison/{report.study}-curves.svg)"]
        parts += [efficiency(report)]
    return "\n\n".join(parts)


def has_curves(report: Report) -> bool:
    """Whether a run has more than one epoch."""
    return any(len(cell.get("curve", ())) > 1 for cell in report.cells)


def efficiency(report: Report) -> str:
    """Training images until validation accuracy first reached each threshold, and the ratio to the reference."""
    plan, rows = report.plan, []
    for task in plan.tasks:
        for threshold in plan.thresholds:
            images = {name: images_to(report, task, name, threshold) for name in plan.names(task)}
            if not any(value for seeds in images.values() for value in seeds.values()):
                continue
            rows.append({"task": task, "to": f"{threshold:g}%"})
            for name, seeds in images.items():
                reached = [value for value in seeds.values() if value]
                text = f"{statistics.fmean(reached):,.0f}" if reached else NONE
                text += f" ({len(reached)} of {len(seeds)} seeds)" if 0 < len(reached) < len(seeds) else ""
                ratio = geometric_ratio(seeds, images[plan.reference]) if name != plan.reference else None
                if ratio is not None:
                    bounds = f" [{ratio.low:.2f}, {ratio.high:.2f}]" if ratio.count > 1 else ""
                    text += f", {ratio.mean:.2f}x{bounds}"
                rows[-1][report.title(name)] = text
    return markdown(rows) if rows else "No candidate reached any of the thresholds."


def images_to(report: Report, task: str, candidate: str, accuracy: float) -> dict[int, float | None]:
    """Training images until a validation accuracy in percent, by seed; None for seeds that never reached it."""
    return {
        seed: first_reached(cell["curve"], accuracy, min(test["chance"] for test in cell["tests"].values()))
        for seed, cell in report.tested(task, candidate).items()
    }


def first_reached(curve: Sequence[dict[str, Any]], accuracy: float, chance: float) -> float | None:
    """Training images until validation accuracy first reached a value, interpolated linearly; None if it never did.

    Args:
        curve: "images" and "top1" at the end of each epoch.
        accuracy: in percent.
        chance: accuracy before the first epoch, in percent.
    """
    images, top1 = [0, *(point["images"] for point in curve)], [chance, *(point["top1"] for point in curve)]
    end = next((i for i, value in enumerate(top1) if value >= accuracy), None)
    return None if end is None else float(np.interp(accuracy, top1[: end + 1][-2:], images[: end + 1][-2:]))


def geometric_ratio(ours: dict[int, float | None], theirs: dict[int, float | None]) -> Interval | None:
    """The geometric mean of ours / theirs over the seeds that have both; its `std` is nan."""
    logs = [math.log(ours[s] / theirs[s]) for s in sorted(set(ours) & set(theirs)) if ours[s] and theirs[s]]
    if not logs:
        return None
    found = interval(logs)
    low, high = (math.exp(min(bound, 700.0)) for bound in (found.low, found.high))
    return found._replace(mean=math.exp(found.mean), std=math.nan, low=low, high=high)


RULES = {  # of outside.json
    "mamba": "Mamba, ours",
    "longhorn": "Longhorn, ours",
    "longhorn_exact": "Longhorn exact, ours",
    "longhorn_exact, eps up to 2": "exact, four heads, eps up to 2, ours",
}


def outside(runs: Sequence[dict[str, Any]], published: dict[str, dict[str, float]]) -> str:
    """A row for each task of outside.py: our accuracies, then the published ones."""
    titles, lines = {title: f"{title}, published" for row in published.values() for title in row}, {}
    for run in runs:
        for figure, accuracy in run["tests"].items():
            name = run["task"] if figure == "accuracy" else f"{run['task']}, length {figure}"
            lines.setdefault((run["task"], name), {})[RULES[run["rule"]]] = f"{accuracy:.1f} ({run['epochs']})"
    return markdown(
        [
            {"task": name}
            | {title: line.get(title, NONE) for title in RULES.values()}
            | {head: f"{published.get(task, {}).get(title, NONE)}" for title, head in titles.items()}
            for (task, name), line in lines.items()
        ]
    )


def step_cost(found: dict[str, Any]) -> str:
    """Time of a training step and peak memory, from cost.json."""
    first = statistics.median(found["rows"][0]["ms"])
    return markdown(
        [
            {
                "candidate": row["candidate"],
                "ms for an image": f"{statistics.median(row['ms']) / found['batch']:.2f}",
                "to the first": f"{statistics.median(row['ms']) / first:.2f}",
                "peak memory, GB": f"{row['memory_gb']:.2f}",
            }
            for row in found["rows"]
        ]
    )


def curves_figure(report: Report) -> Figure:
    """Mean validation accuracy over training images, a panel for each task."""
    tasks = list(report.plan.tasks)
    columns = min(3, len(tasks))
    rows = -(-len(tasks) // columns)
    figure = Figure(figsize=(4.6 * columns, 3.6 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, task in zip(panels, tasks):
        for name in report.plan.names(task):
            curves = [cell["curve"] for cell in report.tested(task, name).values()]
            if curves:
                images = [point["images"] for point in curves[0]]
                mean = [statistics.fmean(point["top1"] for point in epoch) for epoch in zip(*curves)]
                axes.plot(images, mean, label=report.title(name), color=colour(report, name), marker=".")
        axes.set(title=task, xlabel="training images", ylabel="validation top-1, %", ylim=(0, 101))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.grid(alpha=0.3)
    for axes in panels[len(tasks) :]:
        axes.set_axis_off()
    handles = {line.get_label(): line for axes in panels for line in axes.get_lines()}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, fontsize="small")
    return figure


def draw_all(report: Report, folder: Path) -> list[Path]:
    """Draws the plots of a study's tables, and its curves if it has them; returns the files."""
    curves = {"curves": curves_figure(report)} if has_curves(report) else {}
    return draw(report, folder) + save_figures(report, curves, folder)


def cost(runs: Sequence[dict]) -> str:
    """Time and memory of a training step by image size, a figure for each run of the benchmark."""
    found: dict[int, dict[str, list[str]]] = {}
    for run in runs:
        for row in run["models"]:
            if row["train"] and row["ms"]:
                text = f"{statistics.median(row['ms']) / row['batch']:.0f} ({row['memory_gb']:.2f})"
                found.setdefault(row["size"], {}).setdefault(f"`{row['model']}`", []).append(text)
    models = dict.fromkeys(model for row in found.values() for model in row)
    rows = [
        {"px": f"{size}", "tokens": f"{(size // 16) ** 2:,}"}
        | {model: " / ".join(found[size].get(model, [NONE])) for model in models}
        for size in sorted(found)
    ]
    return markdown(rows)


def readme(text: str, reports: Sequence[Report]) -> str:
    """The README with the plot and the means of one table between its marks."""
    return fill_page(text, "comparison", headline(next(report for report in reports if report.study == HEADLINE[0])))


def headline(report: Report) -> str:
    """The plot of a table, and its means over the seeds."""
    name, means = HEADLINE[1], []
    table = report.plan.tables[name]
    for candidate in participants(report, name):
        values = [list(report.accuracies(task, test, candidate).values()) for task, test, _ in table.points]
        means.append(
            f"{report.title(candidate)} {listed(f'{interval(value).mean:.1f}%' if value else NONE for value in values)}"
        )
    return (
        f"![{table.title}](docs/comparison/{report.study}-{name}.svg)\n\nTest accuracy at "
        f"{listed(f'{x:g}' for _, _, x in table.points)} {table.axis}, means of {len(report.plan.seeds)} seeds: "
        f"{'; '.join(means)}."
    )


def main() -> None:
    """Writes the page, its plots and the README's part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.parse_args()
    try:
        reports = read_reports(FOLDER)
        texts = {PAGE: page(reports), README: readme(README.read_text(encoding="utf-8"), reports)}
    except (OSError, ValueError) as error:
        parser.error(str(error))
    for path, text in texts.items():
        with atomic_write(path, "w") as file:
            file.write(text)
    plots = [plot for report in reports for plot in draw_all(report, FOLDER)]
    print(f"wrote {PAGE.name}, {README.name} and {len(plots)} plots from {len(reports)} studies")


if __name__ == "__main__":
    main()
