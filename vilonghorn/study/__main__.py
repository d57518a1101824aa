"""Runs a comparison of models: `python -m vilonghorn.study quick` runs configs/studies/quick.yaml.

Learning rates are chosen on the validation split, then each contender is trained from several seeds and tested once. A study
that was killed goes on by the same command, and what is finished is never run again. It leaves results.json, tables.md
and plots in runs/studies/NAME; docs/comparison.md has what came of those that are committed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from ..bench.report import machine
from ..data.files import replacing
from ..data.threads import available_cpus
from ..engine import Interrupted
from .cell import JOBS, one_thread, read_result, result_file, sections, test_data, write_data
from .match import check_sizes
from .plan import Cell, Study, read_study
from .plots import draw
from .tables import tables

CONFIGS = Path("configs/studies")
Job = tuple[str, Cell]  # what to do with a cell: "train" or "test"


def chosen(study: Study, folder: Path, task: str, contender: str) -> float | None:
    """The rate with the best mean validation accuracy over the seeds of the sweep; None before all of them are run.

    Of equal ones, that of the smaller loss is taken; rates that diverged from some seed come last.
    """
    task = study.tasks[task].rates_of or task
    scores = {}
    for rate in study.tasks[task].sweep:
        results = [read_result(folder, Cell(task, contender, rate, seed), "train") for seed in study.sweep_seeds]
        if not all(results):
            return None
        if any("diverged" in result for result in results):
            scores[rate] = -1.0, 0.0
            continue
        means = [statistics.fmean(result["val"][name] for result in results) for name in ("top1", "loss")]
        scores[rate] = means[0], -means[1]
    return max(scores, key=scores.__getitem__)


def final_cells(study: Study, folder: Path) -> Iterator[Cell]:
    """The runs that count, of those contenders whose rates are chosen."""
    for task in study.tasks:
        for contender in study.names(task):
            rate = chosen(study, folder, task, contender)
            if rate is not None:
                yield from (Cell(task, contender, rate, seed) for seed in study.seeds)


def jobs(study: Study, folder: Path) -> list[Job]:
    """What can be done now: runs that are not finished, and tests of those that are and count."""

    def missing(kind: str, cell: Cell) -> bool:
        return not result_file(folder, cell, kind).is_file()

    finals = list(final_cells(study, folder))
    trains = [("train", cell) for cell in dict.fromkeys([*study.sweep_cells(), *finals]) if missing("train", cell)]
    trained = [cell for cell in finals if missing("test", cell) and not missing("train", cell)]
    tests = [("test", cell) for cell in trained if "diverged" not in read_result(folder, cell, "train")]
    return [*tests, *trains]


def run(study: Study, folder: Path, processes: int) -> None:
    """Does all that is left to do, a cell in a process.

    Raises:
        RuntimeError: a process died.
        ValueError, OSError, Interrupted: a cell failed; those in progress are finished first.
    """
    began, commit = time.monotonic(), revision()
    running: dict[Future, Job] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, one_thread) as pool:
        try:
            while True:
                waiting = [job for job in jobs(study, folder) if job not in running.values()]
                for kind, cell in waiting[: 2 * processes - len(running)]:
                    running[pool.submit(JOBS[kind], study, folder, cell, commit)] = kind, cell
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    kind, cell = running.pop(future)
                    future.result()
                    print(
                        f"{time.monotonic() - began:6.0f} s  {kind} {cell.id}: {told(folder, kind, cell)}", flush=True
                    )
        except BrokenProcessPool:
            raise RuntimeError("a process of the study died; the same command goes on where it was") from None
        finally:
            pool.shutdown(cancel_futures=True)


def told(folder: Path, kind: str, cell: Cell) -> str:
    """What came of a job, in a few words."""
    result = read_result(folder, cell, kind)
    if "diverged" in result:
        return result["diverged"]
    if kind == "train":
        return f"validation {result['val']['top1']:.1f}% in {result['seconds']:.0f} s"
    return ", ".join(f"{name} {test['top1']:.1f}%" for name, test in result["tests"].items())


def report(study: Study, folder: Path, name: str, command: Sequence[str], seconds: float) -> dict[str, Any]:
    """Everything that a study found, as plain data; `study_docs` and the tables read nothing else."""
    finals = {cell.id: cell for cell in final_cells(study, folder)}
    cells = []
    for cell in dict.fromkeys([*study.sweep_cells(), *finals.values()]):
        trained, tested = read_result(folder, cell, "train"), read_result(folder, cell, "test")
        own = dict(task=cell.task, contender=cell.contender, rate=cell.rate, seed=cell.seed, counts=cell.id in finals)
        cells.append({**own, **(trained or {}), "tests": tested["tests"] if tested else None})
    return {
        "study": name,
        "command": list(command),
        "commit": revision(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "finished": not jobs(study, folder),
        "seconds": seconds,
        "plan": study.to_dict(),
        "cells": cells,
    }


def revision() -> str | None:
    """The git commit, with a plus sign if files differ from it; None outside of a checkout."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], check=True, capture_output=True, text=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def refuse_if_changed(study: Study, folder: Path) -> None:
    """Refuses to go on with results of another plan.

    Raises:
        ValueError: a finished cell was run with another configuration, or tested on other data.
    """
    for cell in (*study.sweep_cells(), *final_cells(study, folder)):
        trained, tested = read_result(folder, cell, "train"), read_result(folder, cell, "test")
        other = None
        if trained and trained["config"] != json.loads(json.dumps(sections(study, folder, cell))):
            other = result_file(folder, cell, "train"), "another recipe, model or data"
        elif tested and tested.get("data") != test_data(study, folder, cell):
            other = result_file(folder, cell, "test"), "other test sets"
        if other:
            raise ValueError(
                f"{other[0]} is of {other[1]} than the study now says: give --dir another directory, or remove what has "
                "changed"
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status: 0, 2 for an error that a person can set right, 130 if interrupted."""
    argv = list(sys.argv[1:] if argv is None else argv)
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m vilonghorn.study", description=__doc__, formatter_class=form)
    parser.add_argument("name", help=f"of a file in {CONFIGS}, or a path to one")
    parser.add_argument("--dir", type=Path, help="where the runs lie (default: runs/studies/NAME)")
    parser.add_argument("--processes", type=int, default=available_cpus(), help="cells at a time (default: one a core)")
    parser.add_argument("--json", type=Path, help="another file for the results, such as docs/comparison/quick.json")
    parser.add_argument("--list", action="store_true", help="print what is left to do now, and do nothing")
    options = parser.parse_args(argv)
    path = Path(options.name) if options.name.endswith(".yaml") else CONFIGS / f"{options.name}.yaml"
    folder = options.dir or Path("runs/studies") / path.stem
    began = time.monotonic()
    try:
        study = read_study(path)
        if options.json and not options.json.parent.is_dir():
            raise FileNotFoundError(f"there is no folder {options.json.parent} to write {options.json.name} into")
        check_sizes(study)
        refuse_if_changed(study, folder)
        if options.list:
            print("\n".join(f"{kind} {cell.id}" for kind, cell in jobs(study, folder)) or "nothing is left to do")
            return 0
        write_data(study, folder)
        run(study, folder, options.processes)
    except (Interrupted, KeyboardInterrupt):
        print("interrupted: the same command goes on", file=sys.stderr)
        return 130
    except (OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    command = ["python", "-m", "vilonghorn.study", *argv]
    found = report(study, folder, path.stem, command, time.monotonic() - began)
    for target in filter(None, (folder / "results.json", options.json)):
        with replacing(target) as file:
            file.write((json.dumps(found, indent=1) + "\n").encode())
    text = tables(found)
    (folder / "tables.md").write_text(text, encoding="utf-8")
    draw(found, folder)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
