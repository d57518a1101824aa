"""What a scan would take on this processor if nothing but its arithmetic, or nothing but its memory, took time.

The arithmetic is counted for the plain algorithm, token by token, in slots: one slot is a vector instruction that
multiplies or adds, for one number. Backward makes the states again from checkpoints, once to keep them and once more
on its way back. Of a token, a channel costs so many slots for each of its states, and so many more for itself: an
exponential is 12 slots, a division 10 (which is how long it keeps the multipliers from other work). Loads, stores and
sums over channels are not counted. Cleverer algebra needs fewer slots backward (13 a state instead of 19 for the
diagonal rule), so this is a yardstick that stays put when kernels improve, and no proof that they cannot.

How many slots a second there are is measured: multiply-adds in registers, on as many threads as the scan gets.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from vilonghorn.ops import native

# (rule, with backward): slots for each state of a channel, slots for the channel itself; of one token.
SLOTS = {
    # s += (e k) (x - s k), y += s q; gate and SiLU: an exponential and a division each
    ("longhorn", False): (4, 46),
    ("longhorn", True): (4 + 19, 46 + 60),
    # p += s k, s += u k, y += s q
    ("longhorn_exact", False): (3, 46),
    ("longhorn_exact", True): (3 + 12, 46 + 60),
    # an exponential for each state; softplus has a logarithm besides
    ("mamba", False): (15, 58),
    ("mamba", True): (15 + 38, 58 + 80),
}
Rates = dict[str, Any]


class Shape(NamedTuple):
    """Sizes of a scan in one direction."""

    B: int
    L: int
    D: int
    N: int


def arithmetic_ms(rule: str, train: bool, shape: Shape, slots_per_s: float) -> float:
    """Milliseconds of the scan's arithmetic."""
    state, channel = SLOTS[rule, train]
    return shape.B * shape.L * shape.D * (state * shape.N + channel) / slots_per_s * 1e3


def bytes_ms(moved: int, gb_per_s: float) -> float:
    """Milliseconds that bytes take to be read or written once."""
    return moved / gb_per_s / 1e6


def measure_rates(threads: int, moved: int, trials: int = 16, rounds: int = 100_000) -> Rates:
    """What this processor can do, the best of some trials.

    Args:
        threads: that work at once.
        moved: bytes that a copy reads and writes: as many as the scan does, for the rate depends on the cache.
        trials: of each measurement.
        rounds: of multiply-adds in a trial, 768 vectors each.

    Returns:
        "slots_per_s" by instruction set level, the plainest first (without the native library, under "torch.mm": half
        the operations a second of a matrix product, which stays below the others), and "gb_per_s" of a copy.
    """
    levels = {name: _slots_per_s(level, threads, trials, rounds) for name, level in native.levels().items()}
    source = torch.ones(max(1, moved // 8))
    target = torch.empty_like(source)
    copied = 2 * source.numel() * source.element_size()
    seconds = _best(lambda: target.copy_(source), 2 * trials)
    return dict(slots_per_s=levels or {"torch.mm": _product_rate(trials)}, gb_per_s=copied / seconds / 1e9)


def _slots_per_s(level: int, threads: int, trials: int, rounds: int) -> float:
    with ThreadPoolExecutor(threads) as pool:
        lanes = []
        seconds = _best(
            lambda: lanes.append(sum(pool.map(native.multiply_adds, [rounds] * threads, [level] * threads))), trials
        )
    return lanes[0] / seconds


def _product_rate(trials: int, side: int = 1024) -> float:
    a, b = torch.randn(2, side, side)
    return side**3 / _best(lambda: torch.mm(a, b), trials)


def _best(call: Callable[[], object], trials: int) -> float:
    """Seconds of the fastest call."""
    times = []
    for _ in range(trials):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)
