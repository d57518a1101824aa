"""Exports the best weights of runs as float32, float16 and int8: `python benchmarks/export_weights.py RUN...`.

Measures each file by onnxruntime on the run's held-out data, and writes benchmarks/results/export_weights.json;
`python benchmarks/pages.py` then makes the table of docs/export.md.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vilonghorn.data.atomic_files import write_json
from vilonghorn.engine import load_config
from vilonghorn.engine.device import autocast
from vilonghorn.engine.environment import processor
from vilonghorn.engine.evaluate import evaluate
from vilonghorn.engine.loaders import build_loader
from vilonghorn.export.formats import FORMATS
from vilonghorn.export.load import load_for_export
from vilonghorn.export.precision import PRECISIONS
from vilonghorn.export.verify import export

RESULTS = Path(__file__).parent / "results" / "export_weights.json"


class Exported(nn.Module):
    """A file as a model."""

    def __init__(self, kind: str, path: Path) -> None:
        super().__init__()
        self.run = FORMATS[kind].load(path, *FORMATS[kind].libraries())

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        return self.run(images)


def measure(runs: Sequence[str]) -> dict[str, Any]:
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
    command = " ".join(["python benchmarks/export_weights.py", *runs])
    machine = dict(processor=processor(), threads=torch.get_num_threads(), torch=torch.__version__)
    return dict(command=command, machine=machine, files=rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", metavar="RUN", help="directories of runs")
    write_json(RESULTS, measure(parser.parse_args(argv).runs))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
