"""Measures exported files and fills the tables of docs/export.md. Run it in the root of a checkout.

- `python docs/export/make.py speed` times the files of vilonghorn_tiny, the eager model, and DeiT-Ti as ONNX,
  interleaved, with one and two threads, and writes docs/export/speed.json;
- `python docs/export/make.py weights RUN...` exports the best weights of each run with float32, float16 and int8
  weights, measures them by onnxruntime on the run's held-out data, and writes docs/export/weights.json;
- `python docs/export/make.py` fills the tables only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from vilonghorn.bench.interleaved import run_interleaved
from vilonghorn.bench.tables import figure, fill_page, markdown, ratio
from vilonghorn.data.files import atomic_write, write_json
from vilonghorn.engine import load_config
from vilonghorn.engine.build import autocast, build_loader
from vilonghorn.engine.environment import processor
from vilonghorn.engine.evaluate import evaluate
from vilonghorn.export.formats import FORMATS, OPSET, libraries
from vilonghorn.export.model import load_for_export
from vilonghorn.export.runtime import load
from vilonghorn.export.verify import export
from vilonghorn.export.weights import WEIGHTS

PAGE, FOLDER = Path("docs/export.md"), Path("docs/export")
MODEL, DEIT = "vilonghorn_tiny", "deit_tiny_patch16_224"
FILES = {"ort": ("ort", "fp32"), "ort int8": ("ort", "int8"), "onnx": ("onnx", "fp32"), "aoti": ("aoti", "fp32")}
CELLS = {224: (1, 8), 512: (1,)}  # batch sizes by image side
THREADS, ROUNDS = (1, 2), 7

Report = dict[str, Any]


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
        path, model = folder / f"{DEIT}_{side}.onnx", timm.create_model(DEIT, img_size=side).eval()
        images, batch = torch.randn(2, 3, side, side), torch.export.Dim("batch")
        options = dict(input_names=["images"], opset_version=OPSET, verbose=False, external_data=False)
        torch.onnx.export(model, (images,), path, dynamo=True, dynamic_shapes=({0: batch},), **options)
        files.setdefault(DEIT, {})[side] = ("onnx", str(path))
    return files


def make_steps(source: tuple[str, str] | None, side: int) -> dict[str, Callable[[], object]]:
    """A forward pass of a file, or of the eager model, for each batch size; for a file also its loading."""
    run = load(*source, *libraries(source[0])) if source else load_for_export(MODEL)  # no gradients
    steps = {str(batch): partial(run, torch.randn(batch, 3, side, side)) for batch in CELLS[side]}
    return steps | ({"load": partial(load, *source, *libraries(source[0]))} if source else {})


def measure_speed() -> Report:
    """Times everything; returns the report that is saved as JSON."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        files = write_files(Path(folder))

        def measure(sources: dict[str, Any], steps: list[str], side: int, threads: int) -> dict[str, Any]:
            candidates = {name: partial(make_steps, source, side) for name, source in sources.items()}
            found = run_interleaved(candidates, steps, ROUNDS, threads=threads)
            if problem := next((row["problem"] for row in found[steps[0]].values() if row["problem"]), None):
                raise RuntimeError(f"a file could not be timed: {problem}")
            return found

        for threads, (side, batches) in product(THREADS, CELLS.items()):
            sources = {"eager": None} | {name: found[side] for name, found in files.items()}
            found = measure(sources, list(map(str, batches)), side, threads)
            for batch, name in product(batches, sources):
                key = dict(candidate=name, side=side, batch=batch, threads=threads)
                rows.append(key | dict(ms=[round(ms, 3) for ms in found[str(batch)][name]["ms"]]))
        first = {name: found[min(CELLS)] for name, found in files.items()}
        loads = measure(first, ["load"], min(CELLS), THREADS[-1])["load"]
        return dict(
            command="python docs/export/make.py speed",
            date=datetime.now().isoformat(timespec="seconds"),
            machine=f"{processor()}, torch {torch.__version__}",
            rounds=ROUNDS,
            load_seconds={name: round(statistics.median(row["ms"]) / 1e3, 3) for name, row in loads.items()},
            megabytes={name: round(Path(path).stat().st_size / 1e6, 1) for name, (_, path) in first.items()},
            rows=rows,
        )


def speed_tables(report: Report) -> str:
    """Times of the files to the eager model and to DeiT; sizes and loading."""
    cells: dict[tuple[int, ...], dict[str, Any]] = {}
    for row in report["rows"]:
        cells.setdefault((row["side"], row["batch"], row["threads"]), {})[row["candidate"]] = row
    lines = []
    for cell, rows in cells.items():
        line = dict(zip(("px", "batch", "threads"), map(str, cell)))
        line["eager, ms"] = figure(statistics.median(rows["eager"]["ms"]), 1)
        line |= {f"{name} to eager": figure(ratio(rows[name], rows["eager"])) for name in FILES}
        lines.append(line | {"ort to DeiT-Ti as ONNX": figure(ratio(rows["ort"], rows[DEIT]))})
    loads = [
        {"file": name, "MB": f"{report['megabytes'][name]}", "seconds to load": f"{seconds:.3f}"}
        for name, seconds in report["load_seconds"].items()
    ]
    made = f"`{report['command']}`, {report['date'][:10]}, {report['machine']}, medians of {report['rounds']} rounds"
    return f"{made}:\n\n{markdown(lines)}\n\n{markdown(loads)}"


class Exported(nn.Module):
    """A file as a model."""

    def __init__(self, kind: str, path: Path) -> None:
        super().__init__()
        self.run = load(kind, str(path), *libraries(kind))

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        return self.run(images)


def measure_weights(runs: Sequence[str]) -> Report:
    """Bytes and top-1 of each file of each run; returns the report that is saved as JSON."""
    rows = []
    for run in runs:
        model, config = load_for_export(run), load_config(Path(run) / "config.yaml")
        loader = build_loader(config, "cpu", training=False)
        with tempfile.TemporaryDirectory() as folder:
            for kind, weights in product(("onnx", "ort"), WEIGHTS):
                path = Path(folder, f"{weights}{FORMATS[kind].suffix}")
                export(model, kind, path, weights)
                amp = autocast("off", torch.device("cpu"))
                top1 = evaluate({"file": Exported(kind, path)}, loader, amp=amp)["file"]["top1"]
                row = dict(run=Path(run).name, kind=kind, weights=weights, bytes=path.stat().st_size)
                rows.append(row | dict(top1=top1, images=loader.num_samples))
    command = " ".join(["python docs/export/make.py weights", *runs])
    machine = dict(processor=processor(), threads=torch.get_num_threads(), torch=torch.__version__)
    return dict(command=command, machine=machine, files=rows)


def weights_table(report: Report) -> str:
    """A line for each run and format."""
    lines = []
    for run, kind in dict.fromkeys((row["run"], row["kind"]) for row in report["files"]):
        same = {row["weights"]: row for row in report["files"] if (row["run"], row["kind"]) == (run, kind)}
        line = {"weights of": f"{run} ({same['fp32']['images']} images)", "`--to`": f"`{kind}`"}
        line |= {f"{weights}, MB": f"{row['bytes'] / 1e6:.2f}" for weights, row in same.items()}
        lines.append(line | {f"{weights}, top-1": f"{row['top1']:.2f}" for weights, row in same.items()})
    return f"`{report['command']}`:\n\n{markdown(lines)}"


def filled(text: str, folder: Path) -> str:
    """The page with its tables. Raises ValueError if it lacks the marks."""
    for name, table in dict(speed=speed_tables, weights=weights_table).items():
        text = fill_page(text, name, table(json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))))
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("what", nargs="?", choices=("speed", "weights"), help="what to measure (default: nothing)")
    parser.add_argument("runs", nargs="*", metavar="RUN", help="directories of runs, of `weights`")
    options = parser.parse_args(argv)
    if options.what:
        report = measure_speed() if options.what == "speed" else measure_weights(options.runs)
        write_json(FOLDER / f"{options.what}.json", report)
    text = filled(PAGE.read_text(encoding="utf-8"), FOLDER)
    with atomic_write(PAGE, "w") as file:
        file.write(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
