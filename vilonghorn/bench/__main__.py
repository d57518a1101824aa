"""Times the scan and the models: `vilonghorn bench`, on a GPU where there is one.

Candidates run interleaved, each in its own process: the scan of every rule and its roofline, the usual loop in torch or
mamba_ssm, the models and timm's DeiT. Prints tables, a profile, and on a CPU which targets are met. The exit status is
1 if a measurement fails, whatever the targets.
"""

import argparse
import datetime
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jsonargparse.typing import PositiveInt
from torch.profiler import ProfilerActivity, profile

from ..cli import make_parser
from ..data.files import write_json
from ..engine.environment import machine
from ..engine.markdown import markdown
from . import candidates, report
from .candidates import FAMILIES, STEPS, WORKLOADS
from .interleaved import Factory, Row, run_interleaved

SUBJECTS = ("scan", "models", "profile")
SIZES = (224, 384, 512, 768, 1024, 1248)  # pixels
QUICK_SIZES = (224, 512)
ROUNDS, QUICK_ROUNDS = 11, 4
RESTARTS, QUICK_RESTARTS = 3, 2
SCAN_TIMES = 3  # as many rounds of the scans, which are short
PROFILED_STEPS = 3
PRECISIONS = ("highest", "high", "medium", "bf16")


class Benchmark:
    """One run of the command."""

    def __init__(self, options: argparse.Namespace, command: Sequence[str]):
        self.options = options
        date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        self.report: dict[str, Any] = dict(
            command=command, date=date, machine=machine(options.device), seconds={}, finished=False
        )

    def run(self) -> bool:
        """Measures the subjects and writes the file of `--json`. Returns whether everything was measured."""
        print(", ".join(f"{key} {value}" for key, value in self.report["machine"].items()))
        try:
            for subject in self.options.what:
                start = time.monotonic()
                getattr(self, subject)()
                self.report["seconds"][subject] = round(time.monotonic() - start, 1)
            self.report["finished"] = set(SUBJECTS) <= set(self.options.what)
        finally:
            if self.options.device == "cpu":
                self.report["targets"] = report.targets(self.report)
                print("\n" + markdown(report.target_lines(self.report)))
            self.save()
        problems = report.problems(self.report)
        print("".join(f"not measured: {problem}\n" for problem in problems), end="")
        return not problems

    def save(self) -> None:
        """Writes the file of `--json`, if there is one."""
        if self.options.json:
            write_json(self.options.json, self.report)

    def scan(self) -> None:
        """Every rule and backend, with the rates of the roofline measured in the same rounds."""
        device, times = self.options.device, 1 if self.options.quick else SCAN_TIMES
        self.report |= dict(scan=[], rates={})
        for workload in WORKLOADS[device]:
            roofline = candidates.roofline_candidates(workload, device, self.options.threads)
            scans = candidates.scan_candidates(workload, device)
            made = {", ".join(key): make for key, make in scans.items()}
            made |= {name: make for name, (_, make) in roofline.items()}
            for step, found in self.interleave(made, times).items():
                rates = {
                    name: [work / ms * 1e3 for ms in found[name]["ms"] or []] for name, (work, _) in roofline.items()
                }
                self.report["rates"].setdefault(str(workload), {})[step] = rates
                for rule, backend in scans:
                    row = dict(workload=str(workload), rule=rule, backend=backend, train=step == STEPS[True])
                    bounds = candidates.bounds(rule, row["train"], workload, device, rates)
                    self.report["scan"].append(row | found[f"{rule}, {backend}"] | bounds)
        for workload, lines in report.scan_lines(self.report).items():
            print(f"\n{workload}:\n\n{markdown(lines)}")

    def models(self) -> None:
        """The families by size, and how time grows from the smallest size to the largest."""
        options, (tiny, small) = self.options, FAMILIES
        sizes = options.size or (QUICK_SIZES if options.quick else SIZES)
        groups = [("models", tiny, [size]) for size in sizes] + [("models", small, [sizes[0]])]
        if options.device == "cpu" and len(sizes) > 1 and not options.quick:
            groups.append(("growth", [report.TINY], [sizes[0], sizes[-1]]))
        self.report |= dict(models=[], growth=[])
        for key, names, group_sizes in groups:
            cells = [
                dict(
                    model=name, size=size, batch=self.batch(size), precision=options.precision, compiled=options.compile
                )
                for size in group_sizes
                for name in names
            ]
            made = {str(cell): partial(candidates.model_steps, device=options.device, **cell) for cell in cells}
            rows = [
                cell | dict(train=step == STEPS[True]) | found[str(cell)]
                for step, found in self.interleave(made).items()
                for cell in cells
            ]
            self.report[key] += rows
            print("\n" + markdown(report.model_lines(dict(models=rows))))
            self.save()

    def batch(self, size: int) -> int:
        """Images in a batch of `size` pixels a side."""
        return self.options.batch or candidates.default_batch(size, self.options.device)

    def interleave(self, made: dict[str, Factory], times: int = 1) -> dict[str, dict[str, Row]]:
        """Rows by step and candidate, with `times` as many rounds as the options say."""
        options = self.options
        limits = dict(threads=options.threads, device=options.device, restarts=options.restarts)
        return run_interleaved(made, list(STEPS.values()), times * options.rounds, **limits)

    def profile(self) -> None:
        """Operators (on a GPU, kernels) of a training step of the tiny model, by their own time."""
        options = self.options
        size = (options.size or SIZES)[0]
        batch = self.batch(size)
        form = (options.precision, options.device, options.compile)
        step = candidates.model_steps(report.TINY, batch, size, *form)[STEPS[True]]
        own = "self_cpu_time_total" if options.device == "cpu" else "self_device_time_total"
        step()
        with profile(activities=[getattr(ProfilerActivity, options.device.upper())]) as profiler:
            for _ in range(PROFILED_STEPS):
                step()
        events = sorted(profiler.key_averages(), key=lambda event: -getattr(event, own))
        ops = [
            dict(op=event.key, calls=event.count / PROFILED_STEPS, ms=getattr(event, own) / 1e3 / PROFILED_STEPS)
            for event in events
        ]
        found = dict(model=report.TINY, batch=batch, size=size, ms=sum(op["ms"] for op in ops), ops=ops)
        self.report["profile"] = found
        print(f"\n{report.TINY}, batch {batch}, {size} px, {STEPS[True]}: {found['ms']:.1f} ms under the profiler\n")
        print(markdown(report.profile_lines(found)))


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command, also of its completion."""
    about = "Time the scan and the models, interleaved with the usual loop in torch and timm's DeiT."
    parser = make_parser("bench", about, "--quick", "models --size 224 512 --json figures.json")
    add, threads = parser.add_argument, torch.get_num_threads()
    add("what", nargs="*", metavar="|".join(SUBJECTS), help="what to time (default: all)")
    add("--device", choices=("cpu", "cuda"), help="default: cuda where torch finds a GPU, else cpu")
    add("--quick", action="store_true", help="fewer sizes, rounds and restarts")
    add(
        "--rounds",
        type=PositiveInt,
        help=f"timed samples of each measurement (default: {ROUNDS}, --quick: {QUICK_ROUNDS})",
    )
    add("--size", type=PositiveInt, nargs="+", help="sides of the images in pixels (default: 224 to 1248)")
    add("--batch", type=PositiveInt, help="images in a batch (default: by size)")
    add("--threads", type=PositiveInt, default=threads, help="CPU threads (default: as many as torch uses)")
    add(
        "--precision",
        choices=PRECISIONS,
        help="of products in models: torch's float32 matmul precision, or autocast to bf16 "
        "(default: highest, on a GPU bf16)",
    )
    add("--compile", action="store_true", help="compile the models block by block")
    add("--json", type=Path, help="also write all figures to this file, as they come (default: none)")
    return parser


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options, with the defaults that depend on other options."""
    parser = build_parser()
    options = parser.parse_args(argv)
    if unknown := set(options.what) - set(SUBJECTS):
        parser.error(f"cannot measure {', '.join(sorted(unknown))}: expected {', '.join(SUBJECTS)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU")
    if odd := [size for size in options.size or [] if size % 16]:
        parser.error(f"--size {odd[0]}: expected a multiple of 16 pixels, the patches of the models")
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"{options.json}: there is no folder {options.json.absolute().parent}")
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options.precision = options.precision or ("bf16" if options.device == "cuda" else "highest")
    options.size = sorted(options.size or [])
    options.what = [subject for subject in SUBJECTS if subject in (options.what or SUBJECTS)]
    options.rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    options.restarts = QUICK_RESTARTS if options.quick else RESTARTS
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(argv)
    torch.set_num_threads(options.threads)
    try:
        return 0 if Benchmark(options, ["python", "-m", "vilonghorn.bench", *argv]).run() else 1
    except KeyboardInterrupt:
        print("\ninterrupted" + (f": {options.json} holds what was measured" if options.json else ""))
        return 130


if __name__ == "__main__":
    sys.exit(main())
