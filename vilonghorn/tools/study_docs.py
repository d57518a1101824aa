"""Makes docs/comparison.md out of committed studies: `python -m vilonghorn.tools.study_docs`.

Figures come from docs/comparison/*.json, which `python -m vilonghorn.tools.study NAME --json docs/comparison/NAME.json`
writes; the prose around them from text.md beside them, in which $studies stands for tables and plots.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from string import Template

from ..data.files import replacing
from .study_plots import draw, plot_file
from .study_stats import Report
from .study_tables import (
    costs,
    differences,
    differences_title,
    efficiencies,
    findings,
    rates,
    scores,
    summary,
)

PAGE, FOLDER = Path("docs/comparison.md"), Path("docs/comparison")
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


def page(folder: Path) -> str:
    """The text of docs/comparison.md.

    Args:
        folder: with text.md and the studies.
    """
    studies = "\n\n".join(section(report, folder.name) for report in reports(folder)) or NO_STUDY
    return Template((folder / "text.md").read_text(encoding="utf-8")).substitute(studies=studies)


def section(report: Report, folder: str) -> str:
    """A study: what it is of, then each table with its plot and what it says.

    Args:
        report: of the study.
        folder: of the plots, as seen from the page.
    """
    name = report["study"]
    parts = [f"## Study `{name}`", summary(report)]
    for table, plan in report["plan"]["tables"].items():
        parts += [f"### {plan['title']}", f"![{plan['title']}]({folder}/{plot_file(report, table)})", scores(report, table)]
        parts += [differences_title(report), differences(report, table), findings(report, table)]
    parts += ["### Accuracy while training images are seen", f"![Curves]({folder}/{plot_file(report, 'curves')})"]
    parts += [
        "Training images seen until validation accuracy first reached a threshold, the mean over the seeds that did, and "
        "how many times as many as the reference, the geometric mean over the seeds in which both did, with its 95% "
        "confidence interval:",
        efficiencies(report),
        "### What a training image costs",
        "Time of one thread, the median over the runs, which shared the machine with each other; and what autograd keeps "
        "of a forward pass, counted. " + LOOP,
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
    """Writes the page and its plots, in the working directory; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m vilonghorn.tools.study_docs", description=__doc__.splitlines()[0])
    parser.parse_args(argv)
    if not (FOLDER / "text.md").is_file():
        parser.error(f"there is no {FOLDER / 'text.md'} here: run it in the root of a checkout")
    try:
        text = page(FOLDER)
    except ValueError as error:
        parser.error(str(error))
    with replacing(PAGE) as file:
        file.write(text.encode())
    found = reports(FOLDER)
    plots = [plot for report in found for plot in draw(report, FOLDER)]
    print(f"{PAGE} has {len(found)} studies and {len(plots)} plots from {FOLDER}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
