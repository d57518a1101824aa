"""Streams mosaics of up to 2^20 tiles through the models of the study `million`: accuracy, time and memory.

    python studies/million.py accuracy [exact mamba ...]   # after: python studies/study million
    python studies/million.py cost

An image is made, embedded and read in pieces of `PIECE` tiles; nothing of the size of the image is kept but 8 bytes for
each tile, its number among the digits. A finished row of results/million_streams.json is not run again.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from study.mixers import MIXERS, Attention, Reader
from study.plan import Cell, match_size, read_study
from study.results import read_report
from study.tasks import Recall
from study.training import run_directory
from torch import Tensor

from interleaved import peak_bytes  # isort: skip  (study puts benchmarks/ on the path)
from vilonghorn.data.atomic_files import write_json
from vilonghorn.engine import load_run

ROOT = Path(__file__).parents[1]
RESULTS, RUNS = ROOT / "studies" / "results", ROOT / "runs" / "studies" / "million"
PIECE, BATCH = 1024, 8  # tiles of an image and images at a time
IMAGES = {2**14: 64, 2**16: 32, 2**18: 16, 2**20: 8}  # for each seed
FEWER = {2**14: 16, 2**16: 2}  # of attention, whose time grows with the square
COSTS = [2**power for power in range(10, 21, 2)]
LONGEST = 2**16  # of attention


@torch.inference_mode()
def stream(model: Reader, task: Recall, indices: range, piece: int = PIECE) -> tuple[Tensor, Tensor]:
    """Logits, (images, classes), and labels of some mosaics, read in pieces."""
    mosaics = [task.mosaic(i) for i in indices]

    def tiles(start: int, stop: int) -> Tensor:
        return normalize(torch.stack([torch.from_numpy(task.pixels(m, start, stop)) for m in mosaics]))

    logits = model.stream(tiles, task.grid**2, piece)
    return logits, torch.tensor([m.label for m in mosaics])


def normalize(tiles: Tensor) -> Tensor:
    """(..., 8, 8, 3) bytes as the recipe gives them to a model, (..., 3, 8, 8)."""
    return tiles.movedim(-1, -3).float() / 255 / 0.25


def mosaics(tiles: int, count: int) -> Recall:
    """Test images of the study with another number of tiles."""
    return Recall("test", pairs=4, colours=6, distractors=True, grid=round(tiles**0.5), count=count)


def accuracy(model: Reader, tiles: int, count: int) -> float:
    """Right answers in percent."""
    task, right = mosaics(tiles, count), 0
    for start in range(0, count, BATCH):
        logits, labels = stream(model, task, range(start, min(count, start + BATCH)))
        right += (logits.argmax(1) == labels).sum().item()
    return 100 * right / count


def cost(mixer: str, embed_dim: int, tiles: int) -> dict[str, float]:
    """Seconds of one image, and the peak of memory above that before, in MB."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, task = Reader(mixer, 10, embed_dim=embed_dim).eval(), mosaics(tiles, 1)
    stream(model, mosaics(PIECE, 1), range(1))
    before = peak_bytes() and peak_bytes()
    start = time.perf_counter()
    stream(model, task, range(1))
    return {"seconds": round(time.perf_counter() - start, 3), "mb": round((peak_bytes() - before) / 1e6, 1)}


def is_attention(mixer: str) -> bool:
    """Whether the state grows with the tokens."""
    return issubclass(MIXERS.get(mixer, Reader), Attention)


def main(command: str, *names: str) -> None:
    """Adds the rows that are missing."""
    torch.set_num_threads(1)
    study, file = read_study(ROOT / "studies" / "plans" / "million.yaml"), RESULTS / "million_streams.json"
    report = read_report(RESULTS / "million.json")

    def rows() -> list[dict[str, Any]]:
        return json.loads(file.read_text(encoding="utf-8"))["rows"] if file.exists() else []

    def add(**row: Any) -> None:
        print(row, flush=True)
        write_json(file, {"command": ["python", "studies/million.py"], "rows": [*rows(), row]})

    for name in names or study.candidates:
        kwargs, _ = match_size(study, "million", name)
        mixer, long = kwargs["mixer"], is_attention(kwargs["mixer"])
        if command == "cost":
            for tiles in COSTS:
                key = {"kind": "cost", "candidate": name, "tiles": tiles}
                if (tiles <= LONGEST or not long) and not any(key.items() <= row.items() for row in rows()):
                    code = f"import million; print(million.cost({mixer!r}, {kwargs['embed_dim']}, {tiles}))"
                    env = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # glibc gives freed blocks back
                    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "studies", env=env)
                    add(**key)
            continue
        for tiles, count in (FEWER if long else IMAGES).items():
            for seed, cell in report.tested("million", name).items():
                key = {"kind": "accuracy", "candidate": name, "tiles": tiles, "seed": seed}
                if not any(key.items() <= row.items() for row in rows()):
                    model, _ = load_run(run_directory(RUNS, Cell("million", name, cell["rate"], seed)), "last")
                    start = time.monotonic()
                    found = accuracy(model, tiles, count)
                    add(**key, images=count, top1=found, seconds=round(time.monotonic() - start, 1))
