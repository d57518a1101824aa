"""Measures exported files with float32, float16 and int8 weights: `python docs/export/weights.py RUN...`.

Exports the best weights of each run and measures the files by onnxruntime on the run's held-out data. Writes
docs/export/weights.json, and the table in docs/export.md. With `--time` also the latency of one image, as ratios to the
file with float32 weights; the files take turns.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vilonghorn.bench.interleaved import Steps, run_interleaved
from vilonghorn.data.files import write_json
from vilonghorn.engine import load_config
from vilonghorn.engine.build import autocast, build_loader
from vilonghorn.engine.evaluate import evaluate
from vilonghorn.export import export, load_for_export
from vilonghorn.export.formats import FORMATS, libraries, trunk
from vilonghorn.export.runtime import load
from vilonghorn.export.weights import WEIGHTS
from vilonghorn.tools.env import processor
from vilonghorn.bench.tables import fill_page, markdown

PAGE, FIGURES = Path("docs/export.md"), Path("docs/export/weights.json")
ROUNDS = 15
TEXT = """`python docs/export/weights.py runs/digits runs/mnist` made this table: size, and top-1 on held-out images,
through onnxruntime. `runs/digits` is of `vilonghorn train --config digits`; `runs/mnist` is of the images that
`vilonghorn data mnist` writes, with the options `--config digits --schedule.epochs 3 --schedule.warmup_epochs 1`. With
`--time` the script also measures the latency of one image, as a ratio to float32 weights."""


class Exported(nn.Module):
    """A file as a model."""

    def __init__(self, kind: str, path: Path) -> None:
        super().__init__()
        self.run = load(kind, str(path), *libraries(kind))

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        return self.run(images)


def steps(kind: str, path: Path, shape: tuple[int, ...]) -> Steps:
    """A forward pass of a file."""
    return {"1": partial(load(kind, str(path), *libraries(kind)), torch.randn(1, *shape))}


def measure(run: str, timed: bool) -> list[dict[str, Any]]:
    """Megabytes and top-1 of each file of a run, and with `timed` milliseconds of an image."""
    model, config, rows = load_for_export(run), load_config(Path(run) / "config.yaml"), []
    embed = trunk(model).patch_embed
    with tempfile.TemporaryDirectory() as folder:
        files = {
            (kind, weights): Path(folder, f"{weights}{FORMATS[kind].suffix}")
            for kind in ("onnx", "ort")
            for weights in WEIGHTS
        }
        for (kind, weights), path in files.items():
            export(model, kind, path, weights)
        models = {" ".join(key): Exported(key[0], path) for key, path in files.items()}
        loader = build_loader(config, "cpu", training=False)
        scores = evaluate(models, loader, amp=autocast("off", torch.device("cpu")))
        times: dict[str, Any] = {}
        if timed:
            shape = (embed.in_chans, *embed.img_size)
            candidates = {" ".join(key): partial(steps, key[0], path, shape) for key, path in files.items()}
            times = run_interleaved(candidates, ["1"], ROUNDS, threads=torch.get_num_threads())["1"]
        for (kind, weights), path in files.items():
            name = f"{kind} {weights}"
            row = dict(run=Path(run).name, kind=kind, weights=weights, bytes=path.stat().st_size)
            row |= dict(top1=scores[name]["top1"], images=loader.num_samples)
            rows.append(row | (dict(ms=statistics.median(times[name]["ms"])) if timed else {}))
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each run and format."""
    lines = []
    for run, kind in dict.fromkeys((row["run"], row["kind"]) for row in rows):
        same = {row["weights"]: row for row in rows if (row["run"], row["kind"]) == (run, kind)}
        line = {"weights of": f"{run} ({same['fp32']['images']} images)", "`--to`": f"`{kind}`"}
        line |= {f"{w}, MB": f"{row['bytes'] / 1e6:.2f}" for w, row in same.items()}
        line |= {f"{w}, top-1": f"{row['top1']:.2f}" for w, row in same.items()}
        if "ms" in same["fp32"]:
            line |= {f"{w}, time": f"{row['ms'] / same['fp32']['ms']:.2f}" for w, row in same.items() if w != "fp32"}
        lines.append(line)
    return markdown(lines)


def main() -> None:
    """Measures, and writes both files."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("runs", nargs="+", metavar="RUN", help="directories of runs")
    parser.add_argument("--time", action="store_true", help="also time the files")
    options = parser.parse_args()
    rows = [row for run in options.runs for row in measure(run, options.time)]
    machine = dict(processor=processor(), threads=torch.get_num_threads(), torch=torch.__version__)
    write_json(FIGURES, dict(machine=machine, files=rows))
    PAGE.write_text(fill_page(PAGE.read_text(), "weights", f"{table(rows)}\n\n{TEXT}"))
    print(table(rows))


if __name__ == "__main__":
    main()
