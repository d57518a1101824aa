"""Measures exported files and fills the tables of docs/export.md. Run it in the root of a checkout.

- `python docs/export/make.py weights RUN...` exports the best weights of each run with float32, float16 and int8
  weights, measures them by onnxruntime on the run's held-out data, and writes docs/export/weights.json;
- `python docs/export/make.py` fills the tables only; the times are those of docs/performance/front.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vilonghorn.bench.tables import figure, fill_page, markdown, median, ratio
from vilonghorn.data.files import atomic_write, write_json
from vilonghorn.engine import load_config
from vilonghorn.engine.build import autocast, build_loader
from vilonghorn.engine.environment import processor
from vilonghorn.engine.evaluate import evaluate
from vilonghorn.export.formats import FORMATS
from vilonghorn.export.load import load_for_export
from vilonghorn.export.precision import PRECISIONS
from vilonghorn.export.verify import export

sys.path.append(str(Path(__file__).parents[1] / "performance"))
from front import FILES, KEYS, OURS  # noqa: E402

PAGE, FOLDER = Path("docs/export.md"), Path("docs/export")
NAMES = {"onnxruntime": "onnx", "int8": "onnx, dynamic int8", "ort": "ort", "ort-int8": "ort int8", "aoti": "aoti"}

Report = dict[str, Any]


def speed_tables(report: Report) -> str:
    """Times of the files of each model to the eager model, one table a model, of docs/performance/front.json."""
    text, rows = [], {tuple(row[key] for key in KEYS): row for row in report["rows"] if row["ms"]}
    cells = sorted({key[2:] for key in rows if key[1] == "aoti"}, key=lambda cell: (cell[2], cell[0], cell[1]))
    for model in OURS:
        lines = []
        for cell in cells:
            eager = rows[(model, "eager", *cell)]
            line = dict(zip(("px", "batch", "threads"), map(str, cell))) | {"eager, ms": figure(median(eager), 1)}
            files = {form: rows.get((model, form, *cell)) for form in FILES}
            same = {form: row for form, row in files.items() if row and row["run"] == eager["run"]}
            lines.append(line | {f"{NAMES[form]} to eager": figure(ratio(row, eager)) for form, row in same.items()})
        text.append(f"`{model}`:\n\n{markdown(lines)}")
    return "\n\n".join(text)


class Exported(nn.Module):
    """A file as a model."""

    def __init__(self, kind: str, path: Path) -> None:
        super().__init__()
        self.run = FORMATS[kind].load(path, *FORMATS[kind].libraries())

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
            for kind, weights in product(("onnx", "ort"), PRECISIONS):
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
    files = {"speed": folder.parent / "performance" / "front.json", "weights": folder / "weights.json"}
    for name, table in dict(speed=speed_tables, weights=weights_table).items():
        text = fill_page(text, name, table(json.loads(files[name].read_text(encoding="utf-8"))))
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("what", nargs="?", choices=("weights",), help="what to measure (default: nothing)")
    parser.add_argument("runs", nargs="*", metavar="RUN", help="directories of runs")
    options = parser.parse_args(argv)
    if options.what:
        write_json(FOLDER / "weights.json", measure_weights(options.runs))
    text = filled(PAGE.read_text(encoding="utf-8"), FOLDER)
    with atomic_write(PAGE, "w") as file:
        file.write(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
