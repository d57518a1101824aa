"""Times the models beside timm's DeiT, on a GPU where there is one: `python benchmarks/models.py --quick`.

Models run interleaved, each in its own process. The exit status is 1 if a measurement fails.
"""

import argparse
import datetime
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from candidates import FAMILIES, measure, model_candidates
from interleaved import STEPS, Row
from jsonargparse.typing import PositiveInt
from page_tables import Line, by, figure, markdown, median, ratio

from vilonghorn.data.atomic_files import write_json
from vilonghorn.engine.environment import machine

FULL = dict(size=[224, 384, 512, 768, 1024, 1248], rounds=11, restarts=3)
QUICK = dict(size=[224, 512], rounds=4, restarts=2)

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
default = "cuda" if torch.cuda.is_available() else "cpu"
help = "default: cuda where torch finds a GPU, else cpu"
parser.add_argument("--device", choices=("cpu", "cuda"), default=default, help=help)
parser.add_argument("--quick", action="store_true", help="fewer sizes, rounds and restarts")
help = f"timed samples of each measurement (default: {FULL['rounds']}, --quick: {QUICK['rounds']})"
parser.add_argument("--rounds", type=PositiveInt, help=help)
help = "sides of the images in pixels (default: 224 to 1248)"
parser.add_argument("--size", type=PositiveInt, nargs="+", help=help)
parser.add_argument("--batch", type=PositiveInt, help="images in a batch (default: by size)")
help = "CPU threads (default: as many as torch uses)"
parser.add_argument("--threads", type=PositiveInt, default=torch.get_num_threads(), help=help)
help = "torch's float32 matmul precision of models, or autocast to bf16 (default: highest, on a GPU bf16)"
parser.add_argument("--precision", choices=("highest", "high", "medium", "bf16"), help=help)
parser.add_argument("--compile", action="store_true", help="compile the models block by block")
help = "also write all figures to this file, as they come (default: none)"
parser.add_argument("--json", type=Path, help=help)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options, with the defaults that depend on other options."""
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU")
    if odd := [size for size in options.size or [] if size % 32]:
        parser.error(f"--size {odd[0]}: expected a multiple of 32 pixels, the last stride of vilonghornv2_*")
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"--json {options.json}: there is no folder {options.json.absolute().parent}")
    precision = "bf16" if options.device == "cuda" else "highest"
    defaults = argparse.Namespace(precision=precision, **(QUICK if options.quick else FULL))
    return parser.parse_args(argv, defaults)


def model_lines(rows: Sequence[Row]) -> list[Line]:
    """By size and model: time and peak memory, and both against the first of the family, in bold above 1."""
    models, lines = by(rows, "model", "size"), dict[tuple[str, int], Line]()
    first = {name: family[0] for family in FAMILIES for name in family}
    for (name, size, train), row in models.items():
        line = lines.setdefault((name, size), dict(px=f"{size}", batch=f"{row['batch']}", model=f"`{name}`"))
        deit = models.get((first.get(name), size, train))
        line[f"{STEPS[train]}: ms"] = figure(median(row), 1)
        line[f"{STEPS[train]}: to DeiT"] = figure(ratio(row, deit), bold_above=1)
        if train:
            line["peak memory: GB"] = figure(row["memory_gb"])
            line["peak memory: to DeiT"] = figure(ratio(row, deit, "memory_gb"), bold_above=1)
    return list(lines.values())


def main(argv: Sequence[str]) -> int:
    """Prints and writes the figures; returns 1 if something could not be measured, else 0."""
    options = parse(argv)
    torch.set_num_threads(options.threads)
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    command = ["python", "benchmarks/models.py", *argv]
    report = dict(command=command, date=date, machine=machine(options.device), models=[])
    print(", ".join(f"{key} {value}" for key, value in report["machine"].items()))
    problems = []
    tiny, small = FAMILIES
    for names, size in [*((tiny, size) for size in options.size), (small, options.size[0])]:
        made = model_candidates(names, size, options.batch, options.precision, options.device, options.compile)
        rows = measure(made, options.rounds, options.restarts, options.threads, options.device)
        report["models"] += rows
        if options.json:
            write_json(options.json, report)
        print(f"\n{markdown(model_lines(rows))}", flush=True)
        problems += [f"{row['model']}: {row['problem']}" for row in rows if row["problem"]]
    print("".join(f"not measured: {problem}\n" for problem in dict.fromkeys(problems)), end="")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
