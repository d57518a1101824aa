"""Checks and times the scan and the models: `python -m vilonghorn.bench`, on a GPU where there is one.

On a CPU: the scan in every rule and backend beside loops in torch, the models beside timm's DeiT, a profile, and which
targets are met. On a GPU: every kernel against float64, the scan, one block's kernels, the models. The exit status is
1 if a check or a measurement fails, whatever the targets. This file is the command; the subjects have theirs beside it.
"""

from __future__ import annotations

import argparse
import datetime
import math
import os
import secrets
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from . import check as bench_check
from . import cpu as bench_cpu
from . import model as bench_model
from . import scan as bench_scan
from .device import CopyTask
from .profile import profile_model, report_profile
from .report import draw_models, machine, write_json
from .targets import report_targets
from .tasks import Outcome, Task, run

SUBJECTS = {"cpu": ("scan", "model", "profile"), "cuda": ("check", "scan", "block", "model")}  # by default, in order
ALL = ("check", "scan", "block", "model", "profile")
ROUNDS, RACE_SECONDS, LIVES = {False: 11, True: 4}, {False: 20, True: 5}, {False: 3, True: 2}  # of a race, by --quick
SCAN_TIMES = 3  # as many rounds and seconds for the scans, which are short
PROFILED = ("vilonghorn_tiny", 224)
PREPARE_SECONDS = 150  # the most that tasks may take before they are measured


class Bench:
    """One run of the command: what it was asked for, and what it has found so far. Methods of SUBJECTS are public."""

    def __init__(self, options: argparse.Namespace, command: list[str]):
        self.options, self.device = options, options.device
        self.deadline = time.monotonic() + 60 * options.minutes
        self.passed = True
        date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        self.report: dict[str, Any] = dict(
            command=command, date=date, machine=machine(self.device), seconds={}, finished=False
        )

    def run(self) -> None:
        """All subjects; what is measured is kept as it comes, whatever befalls the rest."""
        print(", ".join(f"{key} {value}" for key, value in self.report["machine"].items()))
        try:
            for subject in self.options.what:
                began = time.monotonic()
                getattr(self, subject)()
                self.report["seconds"][subject] = round(time.monotonic() - began, 1)
                self.save()
            self.report["finished"] = True
        finally:
            if self.device == "cpu" and ("scan" in self.report or "models" in self.report):
                self.report["targets"] = report_targets(self.report)
            self.save()

    def save(self) -> None:
        if self.options.json:
            write_json(self.options.json, self.report)
        rows = self.report.get("models", [])
        if self.options.plot and any(row.get("ms") for row in rows):
            found = self.report["machine"]
            draw_models(self.options.plot, rows, str(found.get("gpu", found["cpu"])))

    def check(self) -> None:
        self.report["seed"] = self.options.seed
        print(f"seed of the checks: {self.options.seed}")
        tasks = bench_check.check_tasks(self.device, self.options.seed)
        self.report["checks"], passed = bench_check.report_checks(list(self._outcomes(tasks)))
        self.passed &= passed

    def scan(self) -> None:
        self._scan_on_cpu() if self.device == "cpu" else self._scan_on_gpu()

    def block(self) -> None:
        forms = (False, True) if self.device == "cuda" else (False,)
        outcomes = self._run([bench_model.BlockTask(self.device, "longhorn", compiled) for compiled in forms])
        self.report["profiles"] = bench_model.report_blocks(outcomes)

    def model(self) -> None:
        self._models_on_cpu() if self.device == "cpu" else self._models_on_gpu()

    def profile(self) -> None:
        name, size = PROFILED
        self.report["profile"] = profile_model(name, self.options.batch or 8, size)
        report_profile(self.report["profile"])

    def _scan_on_cpu(self) -> None:
        options, shape = self.options, bench_cpu.SCAN._replace(B=self.options.batch or bench_cpu.SCAN.B)
        self.report |= dict(shape=shape._asdict(), rates={}, scan=[])
        if not self._in_time("scan"):
            return
        print("mamba_ssm is left out: its kernels are for GPUs alone")
        for rows, rates in bench_cpu.scan_rows(shape, self._effort(1 if options.quick else SCAN_TIMES)):
            step = bench_cpu.STEPS[rows[0]["train"]]
            self.report["rates"][step] = rates
            self.report["scan"] += rows
            self._note(rows, "rule", "form")
            for name, slots in rates["slots_per_s"].items():
                print(
                    f"{name}: {statistics.median(slots) / 1e9:.1f} G multiply-adds a second on {options.threads} threads, beside {step}"
                )
            print(
                f"copy of as many bytes as a scan moves: {statistics.median(rates['gb_per_s']):.1f} GB/s, read and written"
            )
            bench_cpu.print_scans(rows, shape)
            self.save()

    def _effort(self, times: int = 1) -> bench_cpu.Effort:
        options = self.options
        lives = LIVES[options.quick]
        return bench_cpu.Effort(options.threads, times * options.rounds, times * options.seconds, lives)

    def _models_on_cpu(self) -> None:
        options = self.options
        self.report["models"] = []
        self._growth_on_cpu()
        for family, size in bench_cpu.model_cells(options.size, options.quick):
            if not self._in_time(f"{family[0]} and its like, {size} px"):
                continue
            races = bench_cpu.model_rows(family, size, options.batch, self._effort())
            for rows in races:
                self.report["models"] += rows
                self._note(rows, "model", "size")
                bench_cpu.print_models(rows)
                self.save()

    def _growth_on_cpu(self) -> None:
        options = self.options
        self.report["growth"] = []
        if options.quick or not self._in_time("growth"):
            return
        for rows in bench_cpu.growth_rows(self._effort()):
            self.report["growth"] += rows
            self._note(rows, "model", "size")
            bench_cpu.print_growth(rows)
            self.save()

    def _in_time(self, what: str) -> bool:
        """Whether there is time left to begin something; if not, it is named."""
        if time.monotonic() < self.deadline:
            return True
        problem = "not begun in the time there was"
        print(f"\nnot measured: {what}: {problem}")
        self.report.setdefault("not_measured", []).append(dict(task=what, problem=problem))
        return False

    def _note(self, rows: list[dict[str, Any]], *names: str) -> None:
        """Says which rows have a problem instead of figures."""
        for row in rows:
            if row["problem"]:
                print(f"\nnot measured: {', '.join(str(row[name]) for name in names)}: {row['problem']}")
                self.passed = False

    def _scan_on_gpu(self) -> None:
        [copy] = self._run([CopyTask(self.device)], jobs=1)
        outcomes = self._run(bench_scan.scan_tasks(self.device))
        if not copy.rows:
            return
        self.report["copy"] = copy.rows[0]
        print(f"\ncopy within the device: {copy.rows[0]['gb_per_s']:.0f} GB/s, read and written")
        if self.report["machine"]["mamba_ssm"] == "not installed":
            print("mamba_ssm is not installed: nothing to compare with")
        self.report.setdefault("tables", []).extend(bench_scan.report_scans(outcomes, copy.rows[0]["gb_per_s"]))

    def _models_on_gpu(self) -> None:
        jobs = min(self.options.jobs, bench_model.at_once(self.device))
        parts = bench_model.model_tasks(self.device, self.options.size or bench_model.SIZES, self.options.batch)
        outcomes = [outcome for tasks in parts for outcome in self._run(tasks, jobs)]
        tables, self.report["models"] = bench_model.report_models(outcomes)
        self.report.setdefault("tables", []).extend(tables)

    def _outcomes(self, tasks: Sequence[Task], jobs: int | None = None):
        return run(tasks, jobs=jobs or self.options.jobs, deadline=self.deadline, limit=PREPARE_SECONDS)

    def _run(self, tasks: Sequence[Task], jobs: int | None = None) -> list[Outcome]:
        """Runs tasks, says which were not measured, and remembers whether that is an error."""
        outcomes = list(self._outcomes(tasks, jobs))
        for outcome in outcomes:
            if outcome.problem:
                print(f"\nnot measured: {outcome.task.title}: {outcome.problem}")
                found = self.report.setdefault("not_measured", [])
                found.append(dict(task=outcome.task.title, problem=outcome.problem))
                self.passed &= outcome.late or not getattr(outcome.task, "required", True)
        return outcomes


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options, with what the device decides filled in."""
    parser = argparse.ArgumentParser(prog="python -m vilonghorn.bench", description=__doc__.splitlines()[0])
    subjects = "; ".join(f"on {device} {', '.join(names)}" for device, names in SUBJECTS.items())
    parser.add_argument("what", nargs="*", metavar="|".join(ALL), help=f"default: {subjects}")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where torch finds a GPU, else cpu")
    parser.add_argument("--json", type=Path, help="also write all figures there, as they come")
    parser.add_argument("--plot", type=Path, help="also draw the models' time and memory there, as a PNG or SVG")
    parser.add_argument("--batch", type=int, help="images a batch (default: for models by size, else 8)")
    sizes = "sides of the models' images in pixels (default: 224 to 1248; on a GPU to 1024)"
    parser.add_argument("--size", type=int, nargs="+", help=sizes)
    on_cpu = parser.add_argument_group("on a CPU")
    threads = torch.get_num_threads()
    on_cpu.add_argument("--threads", type=int, default=threads, help="torch's threads (default: torch's)")
    on_cpu.add_argument("--rounds", type=int, help="samples of each contender at most (default: 11; --quick: 4)")
    on_cpu.add_argument("--quick", action="store_true", help="fewer sizes and rounds: under 3 minutes on two cores")
    checked = parser.add_argument_group("what checks and GPUs need")
    checked.add_argument("--seed", type=int, help="of the checks' inputs (default: a new one, which is printed)")
    checked.add_argument("--jobs", type=int, help="processes side by side (default: one a core; on a CPU, this one)")
    minutes = "time limit: what does not fit is left out and named (default: none; on a GPU 7.5)"
    checked.add_argument("--minutes", type=float, help=minutes)
    options = parser.parse_args(argv)

    on_gpu = torch.cuda.is_available()
    options.device = options.device or ("cuda" if on_gpu else "cpu")
    if options.device == "cuda" and not on_gpu:
        parser.error("--device cuda: torch finds no GPU")
    gpu = options.device == "cuda"
    if unknown := set(options.what) - set(ALL):
        parser.error(f"cannot measure {', '.join(sorted(unknown))}: expected {', '.join(ALL)}")
    if gpu and "profile" in options.what:
        parser.error("profile is of a CPU: ask for it with --device cpu (on a GPU, block is a profile)")
    options.what = [subject for subject in ALL if subject in (options.what or SUBJECTS[options.device])]
    options.seconds = RACE_SECONDS[options.quick]
    options.rounds = ROUNDS[options.quick] if options.rounds is None else options.rounds
    options.seed = secrets.randbits(31) if options.seed is None else options.seed
    options.jobs = (os.cpu_count() or 1 if gpu else 1) if options.jobs is None else options.jobs
    options.minutes = (7.5 if gpu else math.inf) if options.minutes is None else options.minutes
    numbers = (*(options.size or ()), options.threads, options.rounds, options.jobs, options.batch)
    if min(number for number in numbers if number is not None) < 1:
        parser.error("--batch, --size, --threads, --rounds and --jobs are at least 1")
    for path in filter(None, (options.json, options.plot)):
        if not path.absolute().parent.is_dir():
            parser.error(f"{path}: there is no folder {path.absolute().parent}")
    if options.plot and options.plot.suffix not in (".png", ".svg"):
        parser.error(f"--plot {options.plot}: expected a name that ends in .png or .svg")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    options = parse(argv)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if options.device == "cuda":  # processes side by side, that inductor would each give as many workers as cores
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
    bench = Bench(options, ["python", "-m", "vilonghorn.bench", *(argv or sys.argv[1:])])
    try:
        bench.run()
    except KeyboardInterrupt:
        print("\ninterrupted" + (f": {options.json} has what was measured" if options.json else ""))
        return 130
    return 0 if bench.passed else 1


if __name__ == "__main__":
    sys.exit(main())
