"""Mosaics of up to 2^20 tiles through the models of the study `million`: accuracy, time and memory.

    python studies/million.py cost [exact mamba ...]        # one image of 2^10 to 2^20 tiles, random weights
    python studies/million.py accuracy [exact mamba ...]    # after: python studies/study million

Recurrences read an image in pieces, and make and embed each piece when it is read. What grows with the image are two
bytes for each tile, its number among the digits, and states of some pieces. Attention reads the whole image. A finished
row of results/million_streams.json is not run again. One thread.
"""

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from study import mixers
from study.plan import Cell, data_arguments, match_size, read_study
from study.results import read_report
from study.tasks import Recall
from study.training import run_directory
from torch import Tensor

from interleaved import peak_bytes  # isort: skip  (study puts benchmarks/ on the path)
from vilonghorn.data.atomic_files import write_json
from vilonghorn.engine import load_run
from vilonghorn.models.vim import VisionSSM

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "studies" / "results" / "million_streams.json"
RUNS = ROOT / "runs" / "studies" / "million"
PIECE, BATCH = 1024, 8  # tiles of an image and images that are read at a time
TOGETHER = 32  # pieces with all states in memory
IMAGES = {2**12: 128, 2**14: 32, 2**16: 16, 2**18: 8, 2**20: 8}  # for each seed
FEWER = {2**12: 48, 2**14: 12}  # of attention
COSTS = [2**power for power in range(10, 21, 2)]
LONGEST = 2**16  # of attention


def mosaics(tiles: int, count: int) -> Recall:
    """Test images of the study with another number of tiles."""
    return Recall("test", pairs=4, colours=6, distractors=True, grid=round(tiles**0.5), count=count)


def normalize(pixels: Tensor) -> Tensor:
    """(..., height, width, 3) bytes as the recipe gives them to a model, (..., 3, height, width)."""
    return pixels.movedim(-1, -3).float() / 255 / 0.25


@torch.inference_mode()
def in_pieces(
    model: VisionSSM, task: Recall, indices: range, piece: int = PIECE, together: int = TOGETHER
) -> tuple[Tensor, Tensor]:
    """Logits, (images, classes), and labels of some mosaics, read in pieces."""
    layouts = [task.mosaic(i) for i in indices]

    def tiles(start: int, stop: int) -> Tensor:
        return normalize(torch.stack([torch.from_numpy(task.pixels(layout, start, stop)) for layout in layouts]))

    labels = torch.tensor([layout.label for layout in layouts])
    return mixers.stream(model, tiles, task.grid**2, piece, together), labels


@torch.inference_mode()
def whole(model: VisionSSM, task: Recall, indices: range) -> tuple[Tensor, Tensor]:
    """As `in_pieces`, each image at once."""
    model.set_input_size(img_size=task.side)
    images, labels = zip(*(task[i] for i in indices))
    return torch.cat([model(normalize(torch.from_numpy(image))[None]) for image in images]), torch.tensor(labels)


def is_attention(kwargs: dict[str, Any]) -> bool:
    """Whether the mixer of a model with these arguments keeps all tokens."""
    return issubclass(mixers.MIXERS.get(kwargs.get("mixer"), mixers.Causal), mixers.Attention)


def right(model: VisionSSM, attention: bool, tiles: int, count: int, first: int = 0) -> int:
    """Number of right answers for `count` images from `first` on."""
    task, found = mosaics(tiles, first + count), 0
    for start in range(first, first + count, BATCH):
        indices = range(start, min(first + count, start + BATCH))
        logits, labels = (whole if attention else in_pieces)(model, task, indices)
        found += int((logits.argmax(1) == labels).sum())
    return found


def cost(name: str, kwargs: dict[str, Any], tiles: int) -> dict[str, float]:
    """Processor seconds of one image, and the peak of this process's memory above that before, in MB."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, read = timm.create_model(name, **kwargs).eval(), whole if is_attention(kwargs) else in_pieces
    read(model, mosaics(4 * PIECE, 1), range(1))  # loads libraries
    gc.collect()  # not in the time that is measured
    peak_bytes()
    before, start = peak_bytes(), time.process_time()
    read(model, mosaics(tiles, 1), range(1))
    return {"seconds": round(time.process_time() - start, 3), "mb": round((peak_bytes() - before) / 1e6, 2)}


def measure_cost(*arguments: Any) -> dict[str, float]:
    """`cost` in two processes: the time of one, and the memory of one whose glibc gives freed blocks back, slowly."""
    code = f"import json, million; print(json.dumps(million.cost(*{arguments!r})))"
    options = dict(cwd=Path(__file__).parent, check=True, capture_output=True, text=True)
    plain, gives_back = (
        json.loads(subprocess.run([sys.executable, "-c", code], env=os.environ | extra, **options).stdout)
        for extra in ({}, {"MALLOC_MMAP_THRESHOLD_": "65536"})
    )
    return {"seconds": plain["seconds"], "mb": gives_back["mb"]}


def read_rows() -> list[dict[str, Any]]:
    """The finished rows."""
    return json.loads(RESULTS.read_text(encoding="utf-8"))["rows"] if RESULTS.exists() else []


def add_row(row: dict[str, Any]) -> None:
    """Keeps a finished row."""
    print(row, flush=True)
    write_json(RESULTS, {"command": ["python", "studies/million.py"], "rows": [*read_rows(), row]})


def is_missing(**key: Any) -> bool:
    """Whether no row has these values."""
    return not any(key.items() <= row.items() for row in read_rows())


def best_runs(cells: Sequence[dict[str, Any]], name: str) -> dict[int, dict[str, Any]]:
    """The runs of a candidate by seed, at the rate whose first seed has the best validation accuracy so far."""
    runs = [cell for cell in cells if cell["candidate"] == name and cell["tests"]]
    rates = {cell["rate"]: cell["val"]["top1"] for cell in runs if cell["seed"] == 1}
    best = max(rates, key=rates.__getitem__, default=None)
    return {cell["seed"]: cell for cell in runs if cell["rate"] == best}


def main(command: str, names: list[str]) -> None:
    """Adds the rows that are missing."""
    torch.set_num_threads(1)
    study = read_study(ROOT / "studies" / "plans" / "million.yaml")
    for name in names or study.candidates:
        kwargs, _ = match_size(study, "million", name)
        kwargs |= data_arguments(study.candidates[name].model, mosaics(16, 1))
        long = is_attention(kwargs)
        if command == "cost":
            for tiles in (tiles for tiles in COSTS if tiles <= LONGEST or not long):
                if is_missing(**(key := {"kind": "cost", "candidate": name, "tiles": tiles})):
                    add_row(key | measure_cost(study.candidates[name].model, kwargs, tiles))
            continue
        tested = best_runs(read_report(RESULTS.with_name("million.json")).cells, name)
        for tiles, count in (FEWER if long else IMAGES).items():
            for seed, cell in tested.items():
                key = {"kind": "accuracy", "candidate": name, "tiles": tiles, "seed": seed, "rate": cell["rate"]}
                if is_missing(**key):
                    directory = run_directory(RUNS, Cell("million", name, cell["rate"], seed))
                    model, start = load_run(directory, "last")[0], time.monotonic()
                    found = right(model, long, tiles, count)
                    seconds = round(time.monotonic() - start, 1)
                    add_row(key | {"images": count, "right": found, "seconds": seconds})


if __name__ == "__main__":
    if sys.argv[1:2] not in (["accuracy"], ["cost"]):
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2:])
