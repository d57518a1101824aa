"""Makes docs/performance.md out of committed runs of the benchmark: `python -m vilonghorn.bench.docs`.

Figures come from docs/performance/cpu-*.json (`bench_report` has their schema), the prose around them from text.md
beside them, in which $names stand for tables, as in gpu.md, whose tables are of kernels.json (see `bench_kernels`). The
README's table of speed is made here too.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

from vilonghorn.data.files import replacing

from . import kernels as bench_kernels
from . import tables as bench_tables
from .report import draw_models

PAGE, FOLDER, README = Path("docs/performance.md"), Path("docs/performance"), Path("README.md")
TABLES = ("machines", "verdicts", "losses", "shape", "slots", "scan", "models", "growth", "profile")
PLOT = FOLDER / "models.svg"
NO_RUNS = "No run of the benchmark is committed for this version."
MARK = re.compile(r"(<!-- speed[^>]*-->\n).*?(<!-- end of speed -->)", re.DOTALL)
Report = dict[str, Any]


def page(folder: Path) -> str:
    """The text of docs/performance.md.

    Args:
        folder: with text.md, gpu.md, kernels.json and the runs.
    """
    reports = runs(folder)
    made = {name: getattr(bench_tables, name)(reports) if reports else NO_RUNS for name in TABLES}
    kernels = json.loads((folder / bench_kernels.FILE.name).read_text())
    made["gpu"] = Template((folder / "gpu.md").read_text()).substitute(bench_kernels.tables(kernels)).strip()
    return Template((folder / "text.md").read_text()).substitute(made)


def runs(folder: Path) -> list[Report]:
    """The committed reports in the order of their files, with "file", its name.

    Raises:
        ValueError: a run that was interrupted, or that left out a subject.
    """
    reports = []
    for path in sorted(folder.glob("cpu-*.json")):
        report = json.loads(path.read_text())
        missing = [subject for subject in ("scan", "models", "profile") if not report.get(subject)]
        if missing or not report["finished"]:
            lacks = f"lacks {', '.join(missing)}" if missing else "is of a run that did not finish"
            raise ValueError(f"{path} {lacks}: make it anew with python -m vilonghorn.bench --json {path}")
        reports.append(report | dict(file=path.name))
    return reports


def readme(text: str, folder: Path) -> str:
    """The README with the figures of the runs between its marks, or as it is where there are no runs.

    Raises:
        ValueError: the README has no marks.
    """
    if not MARK.search(text):
        raise ValueError(
            "the README lacks the marks <!-- speed --> and <!-- end of speed -->: put them around its table"
        )
    reports = runs(folder)
    return MARK.sub(lambda match: match[1] + bench_tables.speed(reports) + "\n" + match[2], text) if reports else text


def plot_title(report: Report) -> str:
    """What stands above the plot: where and when its figures were measured."""
    return f"{report['machine']['cpu']}, {report['machine']['threads']} threads, {report['date'][:10]}"


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the page, its plot and the README's table, in the working directory; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m vilonghorn.bench.docs", description=__doc__.splitlines()[0])
    parser.parse_args(argv)
    if not (FOLDER / "text.md").is_file():
        parser.error(f"there is no {FOLDER / 'text.md'} here: run it in the root of a checkout")
    try:
        texts = {PAGE: page(FOLDER), README: readme(README.read_text(), FOLDER)}
    except ValueError as error:
        parser.error(str(error))
    for path, text in texts.items():
        with replacing(path) as file:
            file.write(text.encode())
    reports = runs(FOLDER)
    if reports:
        draw_models(PLOT, reports[0]["models"], plot_title(reports[0]))
    print(f"{PAGE} and {README} have the figures of {len(reports)} run{'' if len(reports) == 1 else 's'} in {FOLDER}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
