"""Runs a comparison of models from a clone: `python studies/study quick` runs plans/quick.yaml.

The learning rate of each candidate is chosen on the validation split. Then the candidate is trained with several seeds.
The results are runs/studies/NAME/results.json, a line for each finished run, and tables.md and plots beside it. The
same command resumes a study that was stopped; runs that are in the results are not run again.
"""

import argparse
import datetime
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vilonghorn.data.atomic_files import atomic_write, only_writer
from vilonghorn.data.threads import available_cpus
from vilonghorn.engine import Interrupted
from vilonghorn.engine.environment import machine

from .plan import Cell, Study, match_size, read_study
from .processes import worker_pool
from .results import Report, cell_of, read_report, remaining_cells, write_report
from .tables import draw, render
from .training import plan_hash, run_cell, write_data

PLANS = Path(__file__).parents[1] / "plans"


def check_unchanged(report: Report, folder: Path, file: Path) -> None:
    """Checks that the results in a file belong to the plan of the report.

    Raises:
        ValueError: a run has another task, candidate, recipe, model, data or tests than the plan.
    """
    for result in report.cells:
        cell = cell_of(result)
        known = cell.task in report.plan.tasks and cell.candidate in report.plan.names(cell.task)
        if not known or result.get("plan") != plan_hash(report.plan, folder, cell):
            raise ValueError(
                f"{file}: run {cell.id} has another recipe, model, data or tests than the plan: undo the change of "
                "the plan, remove the run's line, or give --json another file"
            )


def run(report: Report, folder: Path, processes: int, tasks: Sequence[str], save: Callable[[], None]) -> None:
    """Runs the remaining cells of tasks, several at a time, each in one thread, and adds the results to the report.

    Raises:
        RuntimeError: a process crashed.
        ValueError, OSError, Interrupted: a run failed; the others are stopped and saved.
    """
    start = time.monotonic()
    running: dict[Future, Cell] = {}

    def keep(future: Future) -> None:
        cell = running.pop(future)
        report.cells.append(future.result())
        save()
        print(f"{time.monotonic() - start:6.0f} s  {cell.id}: {describe(report.cells[-1])}", flush=True)

    try:
        with worker_pool(processes) as pool:
            while True:
                cells = remaining_cells(report.plan, report.cells, tasks)
                waiting = [cell for cell in cells if cell not in running.values()]
                for cell in waiting[: processes - len(running)]:
                    write_data(report.plan, folder, cell.task, cell.seed)
                    running[pool.submit(run_cell, report.plan, folder, cell, report.commit)] = cell
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    keep(future)
    except BrokenProcessPool:
        raise RuntimeError("a process of the study crashed: run the same command to resume") from None
    finally:  # runs that ended while the others were being stopped
        for future in [f for f in running if f.done() and not f.cancelled() and f.exception() is None]:
            keep(future)


def describe(result: dict[str, Any]) -> str:
    """The results of a run in a few words."""
    if "diverged" in result:
        return f"diverged: {result['diverged']}"
    tests = ", ".join(f"{name} {test['top1']:.1f}%" for name, test in result["tests"].items())
    return f"validation {result['val']['top1']:.1f}% in {result['seconds']:.0f} s; {tests}"


def revision() -> str | None:
    """The git commit, with "+" where files differ from it; None outside of a checkout."""
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def open_report(name: str, study: Study, argv: list[str], folder: Path, file: Path) -> tuple[Report, list[str]]:
    """The report of a study with the results in `file`, and the tasks whose data are there. Names the other tasks.

    Raises:
        OSError, ValueError: the file is not one of this study, or cannot be read.
    """
    report = Report(
        study=name,
        command=["python", "studies/study", *argv],
        commit=revision(),
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        machine=machine(),
        finished=False,
        plan=study,
        cells=read_report(file).cells if file.exists() else [],
    )
    check_unchanged(report, folder, file)
    tasks = []
    for task, plan in study.tasks.items():
        try:
            plan.dataset("train").check()
            tasks.append(task)
        except FileNotFoundError as error:
            print(f"task {task} is left out: {error}", file=sys.stderr)
    return report, tasks


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command."""
    parser = argparse.ArgumentParser("python studies/study", description=__doc__.split("\n\n")[1], allow_abbrev=False)
    names = ", ".join(sorted(path.stem for path in PLANS.glob("*.yaml")))
    parser.add_argument("name", metavar="PLAN", help=f"{names}, or path of a YAML file")
    parser.add_argument("--dir", type=Path, help="folder of the runs (default: runs/studies/NAME)")
    parser.add_argument("--processes", type=int, default=available_cpus(), help="runs at a time (default: all cores)")
    parser.add_argument(
        "--json", type=Path, help="file of the results, of which the runs are reused (default: DIR/results.json)"
    )
    parser.add_argument("--list", action="store_true", help="print the runs that can start now, and start none")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status: 0, 2 for an error of the user, 130 if interrupted."""
    argv = list(sys.argv[1:] if argv is None else argv)
    options = build_parser().parse_args(argv)
    path = Path(options.name) if options.name.endswith(".yaml") else PLANS / f"{options.name}.yaml"
    folder = options.dir or Path("runs/studies") / path.stem
    file = options.json or folder / "results.json"
    try:
        if find_spec("scipy") is None:  # needed by the tables, after hours of runs
            raise ImportError("the tables need scipy; run: pip install 'vilonghorn[comparison]'")
        study = read_study(path)
        for pair in study.pairs():
            match_size(study, *pair)
        if options.list:
            report, tasks = open_report(path.stem, study, argv, folder, file)
            print("\n".join(cell.id for cell in remaining_cells(study, report.cells, tasks)) or "no run can start")
            return 0
        if not options.json:
            folder.mkdir(parents=True, exist_ok=True)
        with only_writer(file):
            report, tasks = open_report(path.stem, study, argv, folder, file)

            def save() -> None:
                report.finished = not remaining_cells(study, report.cells, study.tasks)
                write_report(report, file)

            folder.mkdir(parents=True, exist_ok=True)
            run(report, folder, options.processes, tasks, save)
            save()
    except (Interrupted, KeyboardInterrupt):
        print("interrupted: run the same command to resume", file=sys.stderr)
        return 130
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    text = render(report) + "\n"
    with atomic_write(folder / "tables.md", "w") as target:
        target.write(text)
    for table in study.tables:
        draw(report, table, folder)
    print(text)
    return 0
