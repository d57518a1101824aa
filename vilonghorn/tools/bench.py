"""Checks and times the scan and the models: `python -m vilonghorn.tools.bench`, on a GPU where there is one.

On a GPU: every kernel against float64, the scan, one block's kernels, the models. On a CPU: the scan and the models.
The exit status is 1 if a check or a measurement fails. This file is the command; the subjects have theirs beside it.
"""

from __future__ import annotations

import argparse
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

from vilonghorn.ops.arguments import RULES

from . import bench_check, bench_host, bench_model, bench_scan
from .bench_device import CopyTask
from .bench_report import draw_models, machine, table, write_json
from .bench_tasks import Outcome, Task, run

SUBJECTS = ("check", "scan", "block", "model")
PREPARE_SECONDS = 150  # the most that tasks may take before they are measured


class Bench:
    """One run of the command: what it was asked for, and what it has found so far. A method is a subject."""

    def __init__(self, options: argparse.Namespace, command: list[str]):
        self.options, self.device = options, options.device
        self.deadline = time.monotonic() + 60 * options.minutes
        self.passed = True
        self.report: dict[str, Any] = dict(machine=machine(self.device), command=command, tables=[])

    def check(self) -> None:
        tasks = bench_check.check_tasks(self.device, self.options.seed)
        self.report["checks"], passed = bench_check.report_checks(list(self._outcomes(tasks)))
        self.passed &= passed

    def scan(self) -> None:
        if self.device == "cpu":
            return self._scan_on_cpu()
        [copy] = self._run([CopyTask(self.device)], jobs=1)
        outcomes = self._run(bench_scan.scan_tasks(self.device))
        if not copy.rows:
            return
        self.report["copy"] = copy.rows[0]
        print(f"\ncopy within the device: {copy.rows[0]['gb_per_s']:.0f} GB/s, read and written")
        if self.report["machine"]["mamba_ssm"] == "not installed":
            print("mamba_ssm is not installed: nothing to compare with")
        self.report["tables"] += bench_scan.report_scans(outcomes, copy.rows[0]["gb_per_s"])

    def block(self) -> None:
        forms = (False, True) if self.device == "cuda" else (False,)
        outcomes = self._run([bench_model.BlockTask(self.device, "longhorn", compiled) for compiled in forms])
        self.report["profiles"] = bench_model.report_blocks(outcomes)

    def model(self) -> None:
        if self.device == "cpu":
            rows = self._models_on_cpu()
        else:
            jobs = min(self.options.jobs, bench_model.at_once(self.device))
            parts = bench_model.model_tasks(self.device, self.options.size, self.options.batch)
            outcomes = [outcome for tasks in parts for outcome in self._run(tasks, jobs)]
            tables, rows = bench_model.report_models(outcomes)
            self.report["tables"] += tables
            self.report["models"] = rows
        if self.options.plot:
            draw_models(self.options.plot, rows, str(self.report["machine"].get("gpu", self.report["machine"]["cpu"])))

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

    def _scan_on_cpu(self) -> None:
        """A table for each rule, and one in which the rules take turns, each on the backend that a model would get."""
        options = self.options
        for train in (False, True):
            form = f"{'forward + backward' if train else 'forward'}, B={options.batch} L=197 D=384 N=16 float32"
            chosen = {}
            for rule in RULES:
                contenders = bench_host.scan_contenders(rule, options.batch, 197, 384, 16, train)
                chosen[rule] = next(call for name, call in contenders.items() if name.startswith("scan, backend"))
                samples = bench_host.measure(contenders, options.rounds)
                self.report["tables"].append(table(f"scan {rule}, {form}", samples))
            self.report["tables"].append(table(f"scan, {form}", bench_host.measure(chosen, options.rounds)))

    def _models_on_cpu(self) -> list[dict[str, Any]]:
        """Prints the tables, and returns rows as `bench_model` makes them."""
        batch, rows = self.options.batch, []
        for size in self.options.size:
            for train in (False, True):
                title = f"model, {'forward + backward' if train else 'forward'}, batch {batch}, {size} px float32"
                contenders = bench_host.model_contenders(bench_model.NAMES, batch, size, train)
                samples = bench_host.measure(contenders, self.options.rounds)
                self.report["tables"].append(table(title, samples))
                for name, seconds in samples.items():
                    cell = dict(model=name, size=size, train=train, compiled=False, batch=batch, memory_gb=None)
                    rate = batch / statistics.median(seconds)
                    rows.append(cell | dict(ms=[1e3 * s for s in seconds], images_per_s=rate))
        return rows


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options, with what the device decides filled in."""
    parser = argparse.ArgumentParser(prog="python -m vilonghorn.tools.bench", description=__doc__.splitlines()[0])
    subjects = "|".join(SUBJECTS)
    parser.add_argument("what", nargs="*", metavar=subjects, help="default: all on a GPU, scan and model on a CPU")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where torch finds a GPU, else cpu")
    parser.add_argument("--json", type=Path, help="also write all figures there")
    parser.add_argument("--plot", type=Path, help="also draw the models' time and memory there, as a PNG")
    parser.add_argument("--batch", type=int, help="images a batch (default: 8; on a GPU, for models, by size)")
    sizes = "sides of the models' images in pixels (default: 224; on a GPU 224 to 1024)"
    parser.add_argument("--size", type=int, nargs="+", help=sizes)
    on_cpu = parser.add_argument_group("on a CPU")
    threads = torch.get_num_threads()
    on_cpu.add_argument("--threads", type=int, default=threads, help="torch's threads (default: torch's)")
    on_cpu.add_argument("--rounds", type=int, default=11, help="samples of each contender (default 11)")
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
    options.what = options.what or (SUBJECTS if gpu else ("scan", "model"))
    if unknown := set(options.what) - set(SUBJECTS):
        parser.error(f"cannot measure {', '.join(sorted(unknown))}: expected {', '.join(SUBJECTS)}")
    options.batch = options.batch if gpu or options.batch is not None else 8
    options.size = options.size or (bench_model.SIZES if gpu else (224,))
    options.seed = secrets.randbits(31) if options.seed is None else options.seed
    options.jobs = (os.cpu_count() or 1 if gpu else 1) if options.jobs is None else options.jobs
    options.minutes = (7.5 if gpu else math.inf) if options.minutes is None else options.minutes
    numbers = (*options.size, options.threads, options.rounds, options.jobs, options.batch)
    if min(number for number in numbers if number is not None) < 1:
        parser.error("--batch, --size, --threads, --rounds and --jobs are at least 1")
    for path in filter(None, (options.json, options.plot)):
        if not path.absolute().parent.is_dir():
            parser.error(f"{path}: there is no folder {path.absolute().parent}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    options = parse(argv)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if options.device == "cuda":  # processes side by side, that inductor would each give as many workers as cores
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
    bench = Bench(options, ["python", "-m", "vilonghorn.tools.bench", *(argv or sys.argv[1:])])
    print(", ".join(f"{key} {value}" for key, value in bench.report["machine"].items()))
    if "check" in options.what:
        bench.report["seed"] = options.seed
        print(f"seed of the checks: {options.seed}")
    for subject in (subject for subject in SUBJECTS if subject in options.what):
        began = time.monotonic()
        getattr(bench, subject)()
        bench.report.setdefault("seconds", {})[subject] = round(time.monotonic() - began, 1)
        if options.json:  # after each subject: what is measured is not lost with the rest
            write_json(options.json, bench.report)
    return 0 if bench.passed else 1


if __name__ == "__main__":
    sys.exit(main())
