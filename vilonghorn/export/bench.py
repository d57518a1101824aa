"""Times an exported file beside the model that it came from, in turns: `--bench` of the command `export`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from vilonghorn.models import VisionSSM

from ..bench.report import machine
from ..bench.turns import Race
from . import runtime as export_runtime

ROUNDS = 21
SECONDS = 60.0  # a batch size may take


def report(model: VisionSSM, kind: str, path: Path, batches: Sequence[int]) -> None:
    """Prints the median latency of both, and their ratio, for each batch size at the model's own image size."""
    threads, sides = torch.get_num_threads(), model.patch_embed.img_size
    found = machine("cpu")
    print(f"\n{threads} threads of {found['cpu']}, {sides[0]}x{sides[1]} px, float32")
    contenders = {
        "eager": partial(_eager, model, batches),
        kind: partial(_exported, kind, str(path), model.in_chans, sides, batches),
    }
    with Race(contenders, threads) as race:
        for batch in batches:
            results = race.run(str(batch), ROUNDS, SECONDS)
            if problem := next((row["problem"] for row in results.values() if row["problem"]), None):
                raise RuntimeError(f"the file could not be timed: {problem}")
            eager, exported = (statistics.median(results[name]["ms"]) for name in ("eager", kind))
            print(
                f"batch {batch}: eager {eager:.1f} ms, {kind} {exported:.1f} ms: {exported / eager:.2f} times "
                f"(medians of {len(results[kind]['ms'])} turns each)"
            )


def _eager(model: VisionSSM, batches: Sequence[int]) -> dict[str, Callable[[], object]]:
    return _steps(model, model.in_chans, model.patch_embed.img_size, batches)


def _exported(
    kind: str, path: str, channels: int, sides: tuple[int, int], batches: Sequence[int]
) -> dict[str, Callable[[], object]]:
    return _steps(export_runtime.LOADERS[kind](path), channels, sides, batches)


def _steps(
    run: export_runtime.Runner, channels: int, sides: tuple[int, int], batches: Sequence[int]
) -> dict[str, Callable[[], object]]:
    """What a contender can be asked to do: a forward pass for each batch size."""

    def step(images: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return run(images)

    return {str(batch): partial(step, torch.randn(batch, channels, *sides)) for batch in batches}
