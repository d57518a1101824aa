"""Makes docs/comparison.md, the pages beside this file, their plots and the README's comparison, from the JSON files.

    python docs/comparison/make.py

A page is a template of templates/, in which ${KIND/ARGUMENT/...} stands for a figure or a table, see `Figures`.
The figures come from the results of the studies (STUDY.json, see study/), outside.json, cost_TASK.json, published.json.
"""

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
from study.results import Interval, Report, interval, read_report
from study.tables import NONE, difference, differences, draw, listed, participants, rates, score, scores, summary

from vilonghorn.bench.tables import fill_page, markdown
from vilonghorn.data.files import atomic_write

FOLDER = Path(__file__).parent
README = FOLDER.parents[1] / "README.md"
STUDIES = (
    "icons",
    "icons_large",
    "recall",
    "hierarchy",
    "hierarchy_128",
    "position",
    "sizes",
    "hierarchy_recall",
    "v2",
    "v2_recall",
    "fashion",
    "solar_cells",
)
PLOTS = (("recall", "long"), ("recall", "same_rate"), ("icons", "top1"))  # study and table; the README shows the first
RULES = {  # of outside.json
    "mamba": "Mamba, ours",
    "longhorn": "Longhorn, ours",
    "longhorn_exact": "Longhorn exact, ours",
    "longhorn_exact, eps up to 2": "exact, four heads, eps up to 2, ours",
}


def read_reports() -> dict[str, Report]:
    """The committed studies by name."""
    return {name: read_report(FOLDER / f"{name}.json") for name in STUDIES}


def load(name: str) -> dict[str, Any]:
    """Reads a JSON file beside this one."""
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


def page_of(template: Path) -> Path:
    """The page that is made of a template."""
    return FOLDER.parent / template.name if template.stem == FOLDER.name else FOLDER / template.name


class Page(Template):
    """A template in which ${...} may have slashes."""

    braceidpattern = r"[\w/]+"


class Figures(dict):
    """What stands for KIND/ARGUMENT/... in the pages: what a function of TABLES or a method of that name returns.

    The first argument of TABLES, `difference` and `images` is the name of a study.
    """

    TABLES = {"summary": summary, "scores": scores, "differences": differences, "rates": rates, "score": score}

    def __init__(self, reports: dict[str, Report]) -> None:
        super().__init__()
        self.reports = reports

    def __missing__(self, key: str) -> str:
        kind, *arguments = key.split("/")
        if kind in self.TABLES:
            return self.TABLES[kind](self.reports[arguments[0]], *arguments[1:])
        if not hasattr(Figures, kind):
            raise KeyError(f"there is no kind of figure {kind!r}, of {key}")
        return getattr(self, kind)(*arguments)

    def difference(self, study: str, task: str, test: str, one: str, other: str, *seeds: str) -> str:
        """Difference of two candidates, seed by seed, in points, with its 95% interval; `seeds`: all that both have."""
        ours, theirs = (self.reports[study].accuracies(task, test, name) for name in (one, other))
        chosen = set(map(int, seeds)) or set(ours) & set(theirs)
        return difference(interval([ours[seed] - theirs[seed] for seed in sorted(chosen)]), False)

    def unlearned(self) -> str:
        """The runs of each rule on four pairs, at all state sizes, and on six, that ended below 90% on the test."""
        recall, texts = self.reports["recall"], []
        tasks = [*(task for task, _, _ in recall.plan.tables["state"].points), "recall6"]
        for name in recall.plan.candidates:
            found = [accuracy for task in tasks for accuracy in recall.accuracies(task, "test", name).values()]
            texts.append(f"{recall.title(name)} {sum(accuracy < 90 for accuracy in found)} of {len(found)}")
        return listed(texts)

    def larger(self) -> str:
        """Top-1 on icons by their size, a row for each candidate and each training of icons and icons_large."""
        icons, large, rows = self.reports["icons"], self.reports["icons_large"], []
        trainings = {
            "64": (icons, "icons"),
            "64, then 128": (large, "icons128"),
            "64, then 64, 96 or 128": (large, "icons_mixed"),
        }
        for name in icons.plan.candidates:
            for sizes, (report, task) in trainings.items():
                texts = {f"{side} pixels": score(report, task, side, name) for side in ("64", "96", "128", "256")}
                if set(texts.values()) != {NONE}:
                    rows.append({"candidate": icons.title(name), "trained at, pixels": sizes, **texts})
        return markdown(rows)

    def switches(self, *names: str) -> str:
        """Candidates of v2 and v2_recall: top-1 on icons, recall at two lengths, and time of a training step.

        `names`: those that are listed; without them all. Time (cost_icons.json) is divided by that of the reference.
        """
        icons, recall, rows = self.reports["v2"], self.reports["v2_recall"], []
        reference, times = icons.title(icons.plan.reference), step_times("icons")
        for name in names or dict.fromkeys([*icons.plan.candidates, *recall.plan.candidates]):
            title = (icons if name in icons.plan.candidates else recall).title(name)
            known = name in icons.plan.candidates and title != reference
            row = {"candidate": title, "icons, %": score(icons, "icons", "64", name)}
            row["difference"] = difference(icons.difference("icons", "64", name) if known else None, False)
            for length in ("16", "4096"):
                row[f"recall, {int(length):,} tiles, %"] = score(recall, "long4_same_rate", length, name)
            row["time of a step"] = f"{times[title] / times[reference]:.2f}" if title in times else NONE
            rows.append(row)
        return markdown(rows)

    def time(self, study: str, name: str, other: str) -> str:
        """Time of a training step of a candidate of a study, divided by that of another."""
        times, title = step_times(study), self.reports[study].title
        return f"{times[title(name)] / times[title(other)]:.2f}"

    def cost(self) -> str:
        """Time of a training step of the candidates of icons, divided by that of Longhorn, and peak memory."""
        names = {candidate.title: name for name, candidate in self.reports["icons"].plan.candidates.items()}
        rows = [row for row in load("cost_icons.json")["rows"] if row["candidate"] in names]
        ratios = [self.time("icons", names[row["candidate"]], "longhorn") for row in rows]
        return markdown(
            [
                {"candidate": row["candidate"], "time of a step": ratio, "peak memory, GB": f"{row['memory_gb']:.2f}"}
                for row, ratio in zip(rows, ratios)
            ]
        )

    def outside(self) -> str:
        """A row for each task of outside.py: our accuracies, with the epochs of training, then the published ones."""
        published = load("published.json")["figures"]
        titles, lines = {title: f"{title}, published" for row in published.values() for title in row}, {}
        for run in load("outside.json")["runs"]:
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

    def images(self, study: str, *tasks: str) -> str:
        """Training images until validation accuracy first reached each threshold, and the ratio to the reference."""
        report, rows = self.reports[study], []
        reference = report.plan.reference
        for task in tasks:
            for threshold in report.plan.thresholds:
                images = {name: images_to(report, task, name, threshold) for name in report.plan.names(task)}
                row = {"task": task, "to": f"{threshold:g}%"}
                for name, seeds in images.items():
                    reached = [value for value in seeds.values() if value]
                    text = f"{statistics.fmean(reached):,.0f}" if reached else NONE
                    text += f" ({len(reached)} of {len(seeds)} seeds)" if 0 < len(reached) < len(seeds) else ""
                    ratio = geometric_ratio(seeds, images[reference]) if name != reference else None
                    if ratio is not None:
                        bounds = f" [{ratio.low:.2f}, {ratio.high:.2f}]" if ratio.count > 1 else ""
                        text += f", {ratio.mean:.2f}x{bounds}"
                    row[report.title(name)] = text
                rows.append(row)
        return markdown(rows)


def step_times(task: str) -> dict[str, float]:
    """Median time of a training step in ms by the title of a candidate."""
    return {row["candidate"]: statistics.median(row["ms"]) for row in load(f"cost_{task}.json")["rows"]}


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


def headline(report: Report, name: str) -> str:
    """The README's part: the plot of a table, and its means over the seeds."""
    table, means = report.plan.tables[name], []
    for candidate in participants(report, name):
        values = [list(report.accuracies(task, test, candidate).values()) for task, test, _ in table.points]
        means.append(f"{report.title(candidate)} {listed(f'{statistics.fmean(value):.1f}%' for value in values)}")
    return (
        f"![{table.title}](docs/comparison/{report.study}-{name}.svg)\n\nTest accuracy at "
        f"{listed(f'{x:g}' for _, _, x in table.points)} {table.axis}, means of {len(report.plan.seeds)} seeds: "
        f"{'; '.join(means)}."
    )


def pages(reports: dict[str, Report]) -> dict[Path, str]:
    """The text of all pages, by file."""
    templates, figures = sorted((FOLDER / "templates").glob("*.md")), Figures(reports)
    note = "\n<!-- python docs/comparison/make.py makes this page of docs/comparison/templates -->\n"
    texts = {page_of(file): Page(file.read_text(encoding="utf-8")).substitute(figures) + note for file in templates}
    study, table = PLOTS[0]
    readme = fill_page(README.read_text(encoding="utf-8"), "comparison", headline(reports[study], table))
    return texts | {README: readme}


def main() -> None:
    """Writes the pages, the plots and the README's part."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    reports = read_reports()
    for path, text in pages(reports).items():
        with atomic_write(path, "w") as file:
            file.write(text)
        print(path)
    for study, table in PLOTS:
        print(draw(reports[study], table, FOLDER))


if __name__ == "__main__":
    main()
