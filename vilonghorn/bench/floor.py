"""What a scan would take on this processor if nothing but its arithmetic, or nothing but its memory, took time.

The arithmetic is counted for the plain algorithm, token by token, in slots: one slot is a vector instruction that
multiplies or adds, for one number. Backward makes the states again from checkpoints, once to keep them and once more
on its way back. Of a token, a channel costs so many slots for each of its states, and so many more for itself: an
exponential is 12 slots, a division 10 (which is how long it keeps the multipliers from other work). Loads, stores and
sums over channels are not counted. Cleverer algebra needs fewer slots backward (13 a state instead of 19 for the
diagonal rule), so this is a yardstick that stays put when kernels improve, and no proof that they cannot.

How many slots a second there are is measured in the same race as the scans, round by round, for a processor that others
use too is not as fast at one moment as at the next: multiply-adds in registers, on as many threads as the scan gets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch

from vilonghorn.ops.backends import cpu as native

from .turns import Steps

COPY, PRODUCT = "copy", "torch.mm"
ROUNDS = 20_000  # of multiply-adds in a call, 768 vectors each
SIDE = 1024  # of the matrices

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


def rate_contenders(moved: int, threads: int, names: Sequence[str]) -> dict[str, Callable[[], Steps]]:
    """What tells how fast this processor is just now, to take turns with the scans (see `bench_turns`).

    Args:
        moved: bytes that a copy reads and writes: as many as the scan does, for the rate depends on the cache.
        threads: that work at once.
        names: of the steps, all of which do the same.

    Returns:
        By name: multiply-adds at every instruction set level, the plainest first, and a copy. Without the native library,
        a matrix product instead of the former.
    """
    whats = [*(native.levels() or [PRODUCT]), COPY]
    return {what: partial(_rate_steps, what, moved, threads, names) for what in whats}


def _rate_steps(what: str, moved: int, threads: int, names: Sequence[str]) -> Steps:
    if what == COPY:
        source = torch.ones(max(1, moved // 8))
        call = partial(torch.empty_like(source).copy_, source)
    elif what == PRODUCT:
        call = partial(torch.mm, *torch.randn(2, SIDE, SIDE))
    else:
        shares = [ROUNDS] * threads, [native.levels()[what]] * threads
        call = partial(_all_at_once, ThreadPoolExecutor(threads), *shares)
    return dict.fromkeys(names, call)


def _all_at_once(pool: ThreadPoolExecutor, rounds: list[int], levels: list[int]) -> int:
    return sum(pool.map(native.multiply_adds, rounds, levels))


def rates(found: Mapping[str, Mapping[str, Any]], moved: int, threads: int) -> Rates:
    """What the figures of `rate_contenders` say, round by round.

    Returns:
        "slots_per_s" by instruction set level, the plainest first (without the native library, under "torch.mm": half
        the operations a second of a matrix product, which stays below the others), and "gb_per_s" of a copy; a figure a
        round.

    Raises:
        RuntimeError: one of them failed.
    """
    for name, row in found.items():
        if row["problem"]:
            raise RuntimeError(f"{name} gave no rate: {row['problem']}")
    seconds = {name: [ms / 1e3 for ms in row["ms"]] for name, row in found.items()}
    done = {name: threads * native.multiply_adds(1, level) * ROUNDS for name, level in native.levels().items()}
    slots = {name: [count / s for s in seconds[name]] for name, count in (done or {PRODUCT: SIDE**3}).items()}
    copied = 2 * max(1, moved // 8) * 4
    return dict(slots_per_s=slots, gb_per_s=[copied / s / 1e9 for s in seconds[COPY]])
