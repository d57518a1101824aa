"""Times the scan and the models: `vilonghorn bench`, on a GPU where there is one.

Candidates run interleaved, each in its own process: the scan of every rule, the usual loop in torch and the roofline;
the models and timm's DeiT. The exit status is 1 if a measurement fails.
"""

import argparse
import datetime
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from jsonargparse.typing import PositiveInt

from ..commands import make_parser
from ..data.files import write_json
from ..tools.env import machine
from .candidates import FAMILIES, Candidate, model_candidates, scan_candidates
from .interleaved import STEPS, Row, run_interleaved
from .tables import markdown, model_lines, scan_lines

SIZES, QUICK_SIZES = (224, 384, 512, 768, 1024, 1248), (224, 512)  # pixels
ROUNDS, QUICK_ROUNDS = 11, 4
RESTARTS, QUICK_RESTARTS = 3, 2
SUBJECTS = {"scan": scan_lines, "models": model_lines}
PRECISIONS = ("highest", "high", "medium", "bf16")


def candidates(options: argparse.Namespace, subject: str) -> Iterator[list[Candidate]]:
    """Yields the candidates that run interleaved."""
    if subject == "scan":
        yield from scan_candidates(options.device, options.threads)
        return
    tiny, small = FAMILIES
    for names, size in [*((tiny, size) for size in options.size), (small, options.size[0])]:
        form = (options.batch, options.precision, options.device, options.compile)
        yield model_candidates(names, size, *form)


def measure(options: argparse.Namespace, cells: Sequence[Candidate]) -> list[Row]:
    """The rows of candidates for both steps."""
    limits = dict(threads=options.threads, device=options.device, restarts=options.restarts)
    made = {str(cell): factory for cell, factory in cells}
    found = run_interleaved(made, list(STEPS.values()), options.rounds, **limits)
    return [cell | dict(train=train) | found[step][str(cell)] for train, step in STEPS.items() for cell, _ in cells]


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command, also of its completion."""
    about = "Time the scan and the models, interleaved with the usual loop in torch and timm's DeiT."
    parser = make_parser("bench", about, "--quick", "models --size 224 512 --json figures.json")
    add = parser.add_argument
    add("what", nargs="?", choices=tuple(SUBJECTS), help="what to time (default: both)")
    add("--device", choices=("cpu", "cuda"), help="default: cuda where torch finds a GPU, else cpu")
    add("--quick", action="store_true", help="fewer sizes, rounds and restarts")
    rounds = f"timed samples of each measurement (default: {ROUNDS}, --quick: {QUICK_ROUNDS})"
    add("--rounds", type=PositiveInt, help=rounds)
    add("--size", type=PositiveInt, nargs="+", help="sides of the images in pixels (default: 224 to 1248)")
    add("--batch", type=PositiveInt, help="images in a batch (default: by size)")
    threads = torch.get_num_threads()
    add("--threads", type=PositiveInt, default=threads, help="CPU threads (default: as many as torch uses)")
    precision = "of products in models: torch's float32 matmul precision, or autocast to bf16"
    add("--precision", choices=PRECISIONS, help=f"{precision} (default: highest, on a GPU bf16)")
    add("--compile", action="store_true", help="compile the models block by block")
    add("--json", type=Path, help="also write all figures to this file, as they come (default: none)")
    return parser


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options, with the defaults that depend on other options."""
    parser = build_parser()
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU")
    if odd := [size for size in options.size or [] if size % 16]:
        parser.error(f"--size {odd[0]}: expected a multiple of 16 pixels, the patches of the models")
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"--json {options.json}: there is no folder {options.json.absolute().parent}")
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options.precision = options.precision or ("bf16" if options.device == "cuda" else "highest")
    options.size = sorted(options.size or (QUICK_SIZES if options.quick else SIZES))
    options.rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    options.restarts = QUICK_RESTARTS if options.quick else RESTARTS
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(argv)
    torch.set_num_threads(options.threads)
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    report = dict(command=["vilonghorn", "bench", *argv], date=date, machine=machine(options.device))
    print(", ".join(f"{key} {value}" for key, value in report["machine"].items()))
    try:
        problems = run(options, report)
    except KeyboardInterrupt:
        print("\ninterrupted" + (f": {options.json} has what was measured" if options.json else ""))
        return 130
    print("".join(f"not measured: {problem}\n" for problem in problems), end="")
    return 1 if problems else 0


def run(options: argparse.Namespace, report: dict[str, Any]) -> list[str]:
    """Measures, prints the tables, and adds the rows to the report; returns what could not be measured."""
    problems = []
    for subject in [options.what] if options.what else SUBJECTS:
        report[subject] = []
        for cells in candidates(options, subject):
            rows = measure(options, cells)
            report[subject] += rows
            if options.json:
                write_json(options.json, report)
            print(f"\n{markdown(SUBJECTS[subject](rows))}", flush=True)
            problems += [f"{row.get('model') or row['rule']}: {row['problem']}" for row in rows if row["problem"]]
    return list(dict.fromkeys(problems))


if __name__ == "__main__":
    sys.exit(main())
