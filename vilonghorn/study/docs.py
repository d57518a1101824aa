"""Makes docs/comparison.md out of committed studies: `python -m vilonghorn.study.docs`.

Figures come from docs/comparison/*.json, which `python -m vilonghorn.study NAME --json docs/comparison/NAME.json`
writes, and docs/performance/cpu-*.json, which the benchmark writes; the prose around them from text.md beside the
studies, in which $studies and $cost stand for tables and plots. The README's figure and its sentence are made here too.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from string import Template

from ..bench import docs as bench_docs
from ..data.files import replacing
from ..tools.compare import markdown
from .plots import draw, plot_file
from .stats import Report, accuracies, interval
from .tables import (
    NONE,
    costs,
    differences,
    differences_title,
    efficiencies,
    findings,
    listed,
    points,
    rates,
    scores,
    summary,
    taking_part,
    titles,
)

PAGE, FOLDER, README = Path("docs/comparison.md"), Path("docs/comparison"), Path("README.md")
BENCHMARK = bench_docs.FOLDER
HEADLINE = "long"  # the study that the README shows, and its table
MARK = re.compile(r"(<!-- comparison[^>]*-->\n).*?(<!-- end of comparison -->)", re.DOTALL)
NO_STUDY = "No study is committed for this version."


def reports(folder: Path) -> list[Report]:
    """The committed studies, in the order of their files.

    Raises:
        ValueError: one of them is not finished.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        if not report["finished"]:
            raise ValueError(f"{path} is of a study that is not finished: go on with {shlex.join(report['command'])}")
        found.append(report)
    return found


def page(folder: Path, benchmark: Path) -> str:
    """The text of docs/comparison.md.

    Args:
        folder: with text.md and the studies.
        benchmark: with the runs of the benchmark.
    """
    studies = "\n\n".join(section(report, folder.name) for report in reports(folder)) or NO_STUDY
    text = Template((folder / "text.md").read_text(encoding="utf-8"))
    return text.substitute(studies=studies, cost=cost(bench_docs.runs(benchmark)))


def cost(runs: Sequence[Report]) -> str:
    """Time and memory of a training step by length, of the models that the benchmark measures, a figure of each run.

    Args:
        runs: of the benchmark, see `bench_docs.runs`.
    """
    found: dict[int, dict[str, list[str]]] = {}
    for run in runs:
        for row in run["models"]:
            if row["train"] and row["ms"]:
                text = f"{statistics.median(row['ms']) / row['batch']:.0f} ({row['memory_gb']:.2f})"
                found.setdefault(row["size"], {}).setdefault(row["model"], []).append(text)
    models = dict.fromkeys(model for line in found.values() for model in line)
    lines = []
    for size in sorted(found):
        cells = {f"`{model}`": " / ".join(found[size].get(model, [NONE])) for model in models}
        lines.append({"px": f"{size}", "tokens": f"{(size // 16) ** 2:,}", **cells})
    return markdown(lines) if lines else bench_docs.NO_RUNS


def readme(text: str, found: Sequence[Report]) -> str:
    """The README with a figure and a sentence of one study between its marks, or as it is where that is not there.

    Raises:
        ValueError: the README has no marks.
    """
    if not MARK.search(text):
        raise ValueError(
            "the README lacks the marks <!-- comparison --> and <!-- end of comparison -->: put them around its figure"
        )
    shown = next((report for report in found if report["study"] == HEADLINE), None)
    return MARK.sub(lambda match: match[1] + headline(shown) + "\n" + match[2], text) if shown else text


def headline(report: Report) -> str:
    """The figure of one table and, in a sentence, the means over the seeds that it draws."""
    plan, told = report["plan"], []
    for name in taking_part(report, HEADLINE):
        means = [
            f"{interval(list(values.values())).mean:.1f}%" if values else NONE
            for task, test, _ in points(report, HEADLINE)
            for values in [accuracies(report, task, test, name)]
        ]
        told.append(f"{titles(report)[name]} {listed(means)}")
    axis, places = plan["tables"][HEADLINE]["axis"], listed(f"{x:g}" for _, _, x in points(report, HEADLINE))
    title, picture = plan["tables"][HEADLINE]["title"], f"{FOLDER}/{plot_file(report, HEADLINE)}"
    sentence = f"Test accuracy at {places} {axis}, means of {len(plan['seeds'])} seeds: {'; '.join(told)}."
    return f"![{title}]({picture})\n\n{sentence}"


def section(report: Report, folder: str) -> str:
    """A study: what it is of, then each table with its plot and what it says.

    Args:
        report: of the study.
        folder: of the plots, as seen from the page.
    """
    name = report["study"]
    parts = [f"## Study `{name}`", summary(report)]
    for table, plan in report["plan"]["tables"].items():
        parts += [
            f"### {plan['title']}",
            f"![{plan['title']}]({folder}/{plot_file(report, table)})",
            scores(report, table),
        ]
        parts += [differences_title(report), differences(report, table), findings(report, table)]
    parts += ["### Accuracy while training images are seen", f"![Curves]({folder}/{plot_file(report, 'curves')})"]
    parts += [
        "Training images seen until validation accuracy first reached a threshold, the mean over the seeds that did, and "
        "how many times as many as the reference, the geometric mean over the seeds in which both did, with its 95% "
        "confidence interval:",
        efficiencies(report),
        "### What a training image costs",
        "Wall time of one thread, the median over the runs, and what autograd keeps of a forward pass, counted. The cores "
        "were shared with other work, so the times only bound what a contender takes from above. " + LOOP,
        costs(report),
        "### Learning rates",
        rates(report),
    ]
    return "\n\n".join(parts)


LOOP = (
    "Mamba with learned A runs as a loop in plain torch, and shared directions and it are composed of smaller operators, "
    "where the others run fused: their times say how they are written here and not what they could cost."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the page, its plots and the README's part, in the working directory; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m vilonghorn.study.docs", description=__doc__.splitlines()[0])
    parser.parse_args(argv)
    if not (FOLDER / "text.md").is_file():
        parser.error(f"there is no {FOLDER / 'text.md'} here: run it in the root of a checkout")
    try:
        found = reports(FOLDER)
        texts = {PAGE: page(FOLDER, BENCHMARK), README: readme(README.read_text(encoding="utf-8"), found)}
    except ValueError as error:
        parser.error(str(error))
    for path, text in texts.items():
        with replacing(path) as file:
            file.write(text.encode())
    plots = [plot for report in found for plot in draw(report, FOLDER)]
    print(f"{PAGE} and {README} have {len(found)} studies and {len(plots)} plots from {FOLDER}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
