"""Runs a comparison of models: `vilonghorn study quick` runs configs/studies/quick.yaml.

The learning rate of each candidate is chosen on the validation split. Then the candidate is trained with several seeds,
and each run is tested once. The same command resumes a study that was stopped; finished runs are reused. The results
are runs/studies/NAME/results.json, tables.md and plots. docs/comparison.md shows those of committed studies.
"""

import argparse
import datetime
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..commands import make_parser
from ..data.files import atomic_write
from ..data.threads import available_cpus
from ..engine import Interrupted
from ..engine.command_line import configs_folder
from ..tools.env import machine
from ..tools.processes import worker_pool
from .cell import check_unchanged, read_result, test_cell, train_cell, write_data
from .match import match_size
from .plan import Cell, Study, read_study
from .plots import draw
from .results import Report, choose_rate
from .tables import render

CONFIGS = configs_folder() / "studies"
JOBS = {"train": train_cell, "test": test_cell}
Job = tuple[str, Cell]  # a key of JOBS, and the cell


def read_results(study: Study, folder: Path) -> dict[Cell, dict[str, Any]]:
    """The results of the sweep and of the runs at the rates chosen so far, which have "counts" set."""
    cells = [cell for task, candidate in study.pairs() for cell in study.sweep(task, candidate)]
    results = {cell: {**read_result(folder, cell), "counts": False} for cell in cells}
    sweep = list(results.values())
    for task, candidate in study.pairs():
        rate = choose_rate(study, sweep, task, candidate)
        for cell in (Cell(task, candidate, rate, seed) for seed in study.seeds if rate is not None):
            results[cell] = {**read_result(folder, cell), "counts": True}
    return results


def remaining_jobs(study: Study, folder: Path) -> list[Job]:
    """The jobs that can run now: tests of finished runs, then the runs that are missing."""
    results = read_results(study, folder)
    trained = [cell for cell, result in results.items() if result["counts"] and "seconds" in result]
    tests = [cell for cell in trained if not results[cell]["tests"] and "diverged" not in results[cell]]
    missing = [cell for cell, result in results.items() if "seconds" not in result]
    return [*(("test", cell) for cell in tests), *(("train", cell) for cell in missing)]


def run(study: Study, folder: Path, processes: int) -> None:
    """Runs all remaining jobs, several at a time, each in one thread.

    Raises:
        RuntimeError: a process crashed.
        ValueError, OSError, Interrupted: a job failed; the others are stopped and saved.
    """
    start, commit = time.monotonic(), revision()
    running: dict[Future, Job] = {}
    try:
        with worker_pool(processes) as pool:
            while True:
                waiting = [job for job in remaining_jobs(study, folder) if job not in running.values()]
                for kind, cell in waiting[: 2 * processes - len(running)]:
                    running[pool.submit(JOBS[kind], study, folder, cell, commit)] = kind, cell
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    kind, cell = running.pop(future)
                    future.result()
                    seconds, outcome = time.monotonic() - start, describe(kind, read_result(folder, cell))
                    print(f"{seconds:6.0f} s  {kind} {cell.id}: {outcome}", flush=True)
    except BrokenProcessPool:
        raise RuntimeError("a process of the study crashed: run the same command to resume") from None


def describe(kind: str, result: dict[str, Any]) -> str:
    """The outcome of a job in a few words."""
    if "diverged" in result:
        return result["diverged"]
    if kind == "train":
        return f"validation {result['val']['top1']:.1f}% in {result['seconds']:.0f} s"
    return ", ".join(f"{name} {test['top1']:.1f}%" for name, test in result["tests"].items())


def revision() -> str | None:
    """The git commit, with "+" where files differ from it; None outside of a checkout."""
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command, also of its completion."""
    parser = make_parser(
        "study",
        "Compare the update rules on small tasks. " + __doc__.split("\n\n")[1],
        "quick",
        "plans/mine.yaml --dir runs/mine --list",
    )
    names = ", ".join(sorted(path.stem for path in CONFIGS.glob("*.yaml")))
    parser.add_argument("name", metavar="NAME", help=f"{names}, or path of a YAML file")
    parser.add_argument("--dir", type=Path, help="folder of the runs (default: runs/studies/NAME)")
    parser.add_argument("--processes", type=int, default=available_cpus(), help="runs at a time (default: all cores)")
    parser.add_argument("--json", type=Path, help="also write the results to this file (default: none)")
    parser.add_argument("--list", action="store_true", help="print the jobs that can run now, and run none")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status: 0, 2 for an error of the user, 130 if interrupted."""
    argv = list(sys.argv[1:] if argv is None else argv)
    options = build_parser().parse_args(argv)
    path = Path(options.name) if options.name.endswith(".yaml") else CONFIGS / f"{options.name}.yaml"
    folder = options.dir or Path("runs/studies") / path.stem
    start = time.monotonic()
    try:
        study = read_study(path)
        if options.json and not options.json.parent.is_dir():
            raise FileNotFoundError(f"there is no folder {options.json.parent} to write {options.json.name} into")
        for task, candidate in study.pairs():
            match_size(study, task, candidate)
        for cell in read_results(study, folder):
            check_unchanged(study, folder, cell)
        if options.list:
            print("\n".join(f"{kind} {cell.id}" for kind, cell in remaining_jobs(study, folder)) or "nothing remains")
            return 0
        write_data(study, folder)
        run(study, folder, options.processes)
    except (Interrupted, KeyboardInterrupt):
        print("interrupted: run the same command to resume", file=sys.stderr)
        return 130
    except (OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report = Report(
        study=path.stem,
        command=["python", "-m", "vilonghorn.study", *argv],
        commit=revision(),
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        machine=machine(),
        finished=not remaining_jobs(study, folder),
        seconds=time.monotonic() - start,
        plan=study,
        cells=list(read_results(study, folder).values()),
    )
    text, results = render(report) + "\n", json.dumps(asdict(report), indent=1) + "\n"
    for target, content in (folder / "results.json", results), (folder / "tables.md", text), (options.json, results):
        if target:
            with atomic_write(target, "w") as file:
                file.write(content)
    draw(report, folder)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
