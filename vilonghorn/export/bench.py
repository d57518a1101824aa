"""Times an exported file and the model that it comes from, interleaved: option `--bench` of the export."""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn

from ..bench.interleaved import run_interleaved
from ..engine.environment import processor
from .formats import libraries, trunk
from .runtime import load

ROUNDS = 21


def report(model: nn.Module, kind: str, path: Path, batch_sizes: Sequence[int]) -> None:
    """Prints the median latency of the model and of the file for each batch size, at the model's own image size."""
    embed = trunk(model).patch_embed
    threads, shape = torch.get_num_threads(), (embed.in_chans, *embed.img_size)
    print(f"\n{threads} threads of {processor()}, {shape[1]}x{shape[2]} px, float32")
    sources = {"eager": model, kind: str(path)}
    candidates = {name: partial(_steps, name, source, shape, batch_sizes) for name, source in sources.items()}
    for step, rows in run_interleaved(candidates, list(map(str, batch_sizes)), ROUNDS, threads=threads).items():
        if problem := next((row["problem"] for row in rows.values() if row["problem"]), None):
            raise RuntimeError(f"batch {step} could not be timed: {problem}")
        eager, exported = (statistics.median(rows[name]["ms"]) for name in ("eager", kind))
        times = f"eager {eager:.1f} ms, {kind} {exported:.1f} ms: {exported / eager:.2f} times"
        print(f"batch {step}: {times} (medians of {ROUNDS} rounds)")


def _steps(
    kind: str, source: nn.Module | str, shape: tuple[int, ...], batch_sizes: Sequence[int]
) -> dict[str, Callable[[], object]]:
    """Returns a forward pass of the model, or of the file, for each batch size."""
    run = load(kind, source, *libraries(kind)) if isinstance(source, str) else source
    return {str(size): partial(run, torch.randn(size, *shape)) for size in batch_sizes}
