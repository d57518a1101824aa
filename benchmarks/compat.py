"""Times `mamba_ssm`'s interface on tensors (B, D, L) beside our scan in its own layout; and a scan in pieces.

`python benchmarks/compat.py [--rounds 15]` prints the ratios of medians, and the peak memory of 2^20 tokens in pieces
of 4,096 over that of one piece. One thread.
"""

import argparse
import statistics
from functools import partial
from typing import Any

import torch
from interleaved import STEPS, Steps, run_interleaved
from torch import Tensor

from vilonghorn.compat.selective_scan import selective_scan_fn
from vilonghorn.ops import scan

# Batch, groups, channels of a group, tokens, states: of Vim-Ti, also at 512 px, MambaVision-T, two stages of VMamba-T
SIZES = [(1, 1, 384, 197, 16), (8, 1, 384, 1025, 16), (1, 1, 160, 196, 8), (1, 4, 96, 3136, 1), (1, 4, 384, 196, 1)]
PIECE, TOKENS = 4096, 2**20


def inputs(B: int, G: int, D: int, L: int, N: int) -> dict[str, Tensor]:
    """Arguments of `selective_scan_fn`, (B, G * D, L); with a gate for one group."""
    generator = torch.Generator().manual_seed(0)
    normal = partial(torch.randn, generator=generator)
    values = dict(u=normal(B, G * D, L), delta=normal(B, G * D, L) - 1, B=normal(B, G, N, L), C=normal(B, G, N, L))
    values |= dict(A=-4 * torch.rand(G * D, N, generator=generator), D=normal(G * D), delta_bias=normal(G * D))
    return values | (dict(z=normal(B, G * D, L)) if G == 1 else {})


def theirs(sizes: tuple[int, ...]) -> Steps:
    """Steps of `selective_scan_fn`."""
    values = {name: value.requires_grad_() for name, value in inputs(*sizes).items()}
    return _steps(partial(selective_scan_fn, **values, delta_softplus=True))


def ours(sizes: tuple[int, ...]) -> Steps:
    """Steps of `scan` with the same numbers, each tensor as it takes them."""
    _, G, *_ = sizes
    v = inputs(*sizes)

    def own(t: Tensor) -> Tensor:
        return t.unflatten(1, (G, -1)).permute(1, 0, 3, 2).contiguous().requires_grad_()

    tensors = [own(v["u"]), own(v["delta"]), *(v[name].permute(1, 0, 3, 2).contiguous() for name in "BC")]
    weights = dict(A=v["A"], D=v["D"], dt_bias=v["delta_bias"])
    options: dict[str, Any] = {name: t.unflatten(0, (G, -1)).requires_grad_() for name, t in weights.items()}
    options |= dict(z=v["z"].mT.contiguous().requires_grad_()) if "z" in v else {}
    return _steps(partial(scan, *(t.requires_grad_() for t in tensors), **options, rule="mamba", reverse=(False,) * G))


def _steps(function: Any) -> Steps:
    dy = torch.ones_like(function())

    def forward() -> None:
        with torch.no_grad():
            function()

    return {STEPS[False]: forward, STEPS[True]: lambda: function().backward(dy)}


def pieces(count: int) -> Steps:
    """A scan of so many pieces, of which each has its inputs made anew."""

    def read(state: Tensor | None) -> Tensor:
        x, dt, k, q = (torch.randn(1, 1, PIECE, size) for size in (384, 384, 16, 16))
        return scan(x, dt, k, q, initial_state=state, return_state=True)[1]

    def run() -> None:
        state = None
        for _ in range(count):
            state = read(state)

    return {"scan": run}


def main() -> None:
    """Runs the measurements and prints them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="samples of each (default: %(default)s)")
    parser.add_argument("--only-memory", action="store_true", help="of the scan in pieces")
    options = parser.parse_args()
    rounds = options.rounds
    print("(B, groups, channels, tokens, states): selective_scan_fn over scan, forward and forward + backward")
    for sizes in [] if options.only_memory else SIZES:
        candidates = dict(theirs=partial(theirs, sizes), ours=partial(ours, sizes))
        rows = run_interleaved(candidates, [*STEPS.values()], rounds, threads=1, restarts=3)
        ms = {step: {name: statistics.median(row["ms"]) for name, row in of.items()} for step, of in rows.items()}
        print(sizes, *(f"{of['theirs'] / of['ours']:.2f} ({of['ours']:.2f} ms)" for of in ms.values()), flush=True)
    candidates = {name: partial(pieces, count) for name, count in (("one", 1), ("all", TOKENS // PIECE))}
    memory = run_interleaved(candidates, ["scan"], 1, threads=1)["scan"]
    one, all_of_them = (memory[name]["memory_gb"] for name in ("one", "all"))
    print(f"peak memory of {TOKENS} tokens in pieces of {PIECE} over one piece: {all_of_them / one:.2f} ({one} GB)")


if __name__ == "__main__":
    main()
