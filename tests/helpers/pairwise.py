"""Cases of a scan in which every pair of choices meets, whatever two things are chosen: the full product takes hours.

Shared by the tests of the GPU kernels, which an emulator and an interpreter run.
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from oracle import KERNEL_RULES, compare, inputs

CHOICES = dict(
    rule=KERNEL_RULES,
    L=(1, 2, 63, 197),
    D=(1, 5, 40, 384),
    reverse=((False,), (True,), (False, True)),
    reduce=("none", "mean"),
    gate=(True, False),
    dtype=("float32", "bfloat16", "float16"),
)


class Case(NamedTuple):
    """One sequence in as many directions as `reverse` has flags, with 16 states."""

    rule: str
    L: int
    D: int
    reverse: tuple[bool, ...]
    reduce: str
    gate: bool
    dtype: str


CASES = [
    Case("longhorn", 1, 1, (True,), "mean", False, "bfloat16"),
    Case("mamba", 1, 5, (False,), "none", True, "bfloat16"),
    Case("longhorn_exact", 1, 40, (False, True), "mean", False, "float32"),
    Case("mamba", 1, 384, (True,), "none", True, "float16"),
    Case("longhorn_exact", 2, 1, (False,), "none", True, "float32"),
    Case("longhorn", 2, 5, (True,), "mean", False, "float16"),
    Case("mamba", 2, 40, (False,), "none", False, "float16"),
    Case("longhorn_exact", 2, 384, (False, True), "none", False, "bfloat16"),
    Case("mamba", 63, 1, (False, True), "mean", False, "float16"),
    Case("longhorn_exact", 63, 5, (False,), "mean", True, "float32"),
    Case("longhorn_exact", 63, 40, (True,), "none", True, "bfloat16"),
    Case("longhorn", 63, 384, (False, True), "none", True, "float32"),
    Case("longhorn_exact", 197, 1, (True,), "mean", False, "float32"),
    Case("longhorn_exact", 197, 5, (False, True), "mean", True, "float16"),
    Case("longhorn", 197, 40, (False,), "none", False, "bfloat16"),
    Case("mamba", 197, 384, (False,), "mean", False, "float32"),
]
# Relative: sums in float32, or the rounding of results and of the oracle's cotangent to shorter types.
TOLERANCE = dict(float32=1e-6, bfloat16=8e-3, float16=1e-3)


def pairs(case: Case) -> set[tuple]:
    return set(itertools.combinations(case._asdict().items(), 2))


def all_pairs() -> set[tuple]:
    chosen = itertools.combinations(CHOICES.items(), 2)
    return {((a, x), (b, y)) for (a, xs), (b, ys) in chosen for x in xs for y in ys}


def hold(scan: Callable, case: Case) -> None:
    """Holds y and every gradient of `scan` to the oracle."""
    rule, L, D, reverse, reduce, gate, dtype = case
    values = inputs(len(reverse), 1, L, D, 16, rule=rule, gate=gate, dtype=getattr(torch, dtype))
    compare(scan, values, TOLERANCE[dtype], rule=rule, reverse=reverse, reduce=reduce)
