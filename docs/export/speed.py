"""Times the exported files of vilonghorn_tiny: `python docs/export/speed.py`, in the root of a checkout.

Candidates are the eager model, its files, and DeiT-Ti as ONNX. They take rounds in turn, each in its own process, with
one and two threads. Writes docs/export/speed.json, and from it the tables of docs/export.md; `--page` writes the tables
only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import timm
import torch
from jsonargparse.typing import PositiveInt

from vilonghorn.bench.interleaved import run_interleaved
from vilonghorn.bench.report import figure, ratio
from vilonghorn.data.files import atomic_write, write_json
from vilonghorn.export.formats import FORMATS, OPSET, libraries
from vilonghorn.export.model import load_for_export
from vilonghorn.export.runtime import load
from vilonghorn.export.verify import export
from vilonghorn.tools.env import processor
from vilonghorn.bench.tables import fill_page, markdown

PAGE, JSON = Path("docs/export.md"), Path("docs/export/speed.json")
MODEL, PEER = "vilonghorn_tiny", "deit_tiny_patch16_224"
FILES = {"ort": ("ort", "fp32"), "ort int8": ("ort", "int8"), "onnx": ("onnx", "fp32"), "aoti": ("aoti", "fp32")}
CLOCKS = {"time": time.perf_counter, "processor time": time.process_time}
# File, what it is compared to, image side and batch (None: all): the most that the ratio may be.
TARGETS = (
    ("ort", "eager", None, None, 1.05),
    ("onnx", "eager", None, None, 2.2),
    ("aoti", "eager", None, None, 1.05),
    ("ort", PEER, 224, 1, 1.2),
    ("ort", PEER, 512, None, 1.0),
)
LOAD_SECONDS = 0.2
CELLS = {224: (1, 8), 512: (1,)}  # batch sizes by image side

Row = dict[str, Any]


def write_files(folder: Path) -> dict[str, dict[int, tuple[str, str]]]:
    """Writes the files; returns the format and path of each candidate for each side of an image.

    A file of this library takes all sizes. DeiT's is written for each size: timm's position embedding is fixed.
    """
    files: dict[str, dict[int, tuple[str, str]]] = {}
    for name, (kind, weights) in FILES.items():
        path = folder / f"{MODEL}_{weights}{FORMATS[kind].suffix}"
        export(load_for_export(MODEL), kind, path, weights)
        files[name] = dict.fromkeys(CELLS, (kind, str(path)))
    for side in CELLS:
        path, model = folder / f"{PEER}_{side}.onnx", timm.create_model(PEER, img_size=side).eval()
        images, batch = torch.randn(2, 3, side, side), torch.export.Dim("batch")
        options = dict(input_names=["images"], opset_version=OPSET, verbose=False, external_data=False)
        torch.onnx.export(model, (images,), path, dynamo=True, dynamic_shapes=({0: batch},), **options)
        files.setdefault(PEER, {})[side] = ("onnx", str(path))
    return files


def make_steps(source: tuple[str, str] | None, cells: Sequence[tuple[int, int]]) -> dict[str, Callable[[], object]]:
    """A forward pass of a file, or of the eager model, for each side and batch."""
    run = load(*source, *libraries(source[0])) if source else load_for_export(MODEL)  # no gradients
    return {f"{side} {batch}": partial(run, torch.randn(batch, 3, side, side)) for side, batch in cells}


def make_load(source: tuple[str, str]) -> dict[str, Callable[[], object]]:
    """Loading a file."""
    return {"load": partial(load, *source, *libraries(source[0]))}


def measure(threads: Sequence[int], rounds: int) -> dict[str, Any]:
    """Times everything; returns the report that is saved as JSON."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        files = write_files(Path(folder))
        for count, (side, batches) in product(threads, CELLS.items()):
            cells = [(side, batch) for batch in batches]
            sources = {"eager": None} | {name: found[side] for name, found in files.items()}
            candidates = {name: partial(make_steps, source, cells) for name, source in sources.items()}
            for clock, function in CLOCKS.items():
                steps = [f"{side} {batch}" for batch in batches]
                found = run_interleaved(candidates, steps, rounds, threads=count, clock=function)
                for (_, batch), step in zip(cells, steps):
                    for name, row in found[step].items():
                        if row["problem"]:
                            raise RuntimeError(f"{name} could not be timed: {row['problem']}")
                        key = dict(candidate=name, side=side, batch=batch, threads=count, clock=clock)
                        rows.append(key | dict(ms=[round(ms, 3) for ms in row["ms"]]))
                        print(*key.values(), f"{statistics.median(row['ms']):.1f} ms", flush=True)
        first = {name: found[min(CELLS)] for name, found in files.items()}
        loads = {name: partial(make_load, file) for name, file in first.items()}
        found = run_interleaved(loads, ["load"], rounds, threads=threads[-1])["load"]
        return dict(
            command="python docs/export/speed.py",
            date=datetime.now().isoformat(timespec="seconds"),
            machine=f"{processor()}, torch {torch.__version__}",
            rounds=rounds,
            load_seconds={name: round(statistics.median(row["ms"]) / 1e3, 3) for name, row in found.items()},
            megabytes={name: round(Path(path).stat().st_size / 1e6, 1) for name, (_, path) in first.items()},
            rows=rows,
        )


def tables(report: dict[str, Any]) -> str:
    """The tables of docs/export.md."""
    rows = {tuple(row.values())[:5]: row for row in report["rows"]}
    cells = dict.fromkeys(key[1:4] for key in rows)
    lines = []
    for side, batch, threads in cells:
        line = {"px": f"{side}", "batch": f"{batch}", "threads": f"{threads}"}
        wall = {name: rows[name, side, batch, threads, "time"] for name in ("eager", *FILES, PEER)}
        line["eager, ms"] = figure(statistics.median(wall["eager"]["ms"]), 1)
        for name, other in [(name, "eager") for name in FILES] + [("ort", PEER)]:
            pairs = ([rows[n, side, batch, threads, clock] for n in (name, other)] for clock in CLOCKS)
            column = f"{name} to {'DeiT-Ti as ONNX' if other == PEER else other}"
            line[column] = " / ".join(figure(ratio(*pair)) for pair in pairs)
        lines.append(line)
    loads = [
        {"file": name, "MB": f"{report['megabytes'][name]}", "seconds to load": f"{seconds:.3f}"}
        for name, seconds in report["load_seconds"].items()
    ]
    made = f"`{report['command']}`, {report['date'][:10]}, {report['machine']}, medians of {report['rounds']} rounds"
    return f"{made}; time / processor time:\n\n{markdown(lines)}\n\n{markdown(loads)}\n\n{markdown(verdicts(report))}"


def verdicts(report: dict[str, Any]) -> list[dict[str, str]]:
    """Each target, with the largest ratio of the median times over what it is about."""
    rows = {tuple(row.values())[:5]: row for row in report["rows"]}
    lines = []
    for name, other, side, batch, limit in TARGETS:
        keys = [key[1:] for key in rows if key[0] == name and side in (None, key[1]) and batch in (None, key[2])]
        worst = max(ratio(rows[(name, *key)], rows[(other, *key)]) for key in keys)
        where = f"{f'{side} px' if side else 'all sizes'}, {f'batch {batch}' if batch else 'all batches'}"
        line = {"target": f"{name} to {other}, {where}", "at most": f"{limit:.2f}", "largest ratio": figure(worst)}
        lines.append(line | {"verdict": "met" if worst <= limit else "**NOT MET**"})
    seconds = report["load_seconds"]["ort"]
    line = {"target": "loading ort, seconds", "at most": f"{LOAD_SECONDS:.2f}", "largest ratio": f"{seconds:.3f}"}
    return [*lines, line | {"verdict": "met" if seconds <= LOAD_SECONDS else "**NOT MET**"}]


def fill(text: str, report: dict[str, Any]) -> str:
    """The page with its tables. Raises ValueError if it lacks the markers."""
    return fill_page(text, "speed", tables(report))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=PositiveInt, default=7)
    parser.add_argument("--page", action="store_true", help="write the tables of the last measurement again")
    options = parser.parse_args(argv)
    if not options.page:
        report = measure((1, 2), options.rounds)
        write_json(JSON, report)
    text = fill(PAGE.read_text(encoding="utf-8"), json.loads(JSON.read_text(encoding="utf-8")))
    with atomic_write(PAGE, "w") as file:
        file.write(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
