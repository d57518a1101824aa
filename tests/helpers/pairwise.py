"""Cases of a scan in which every pair of choices meets, whatever two fields are chosen: the full product takes hours.

Shared by the tests of the GPU kernels, which an emulator and an interpreter run.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from oracle import compare, inputs


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
TOLERANCE = dict(float32=1e-6, bfloat16=1.2e-2, float16=1e-3)


def check(scan: Callable, case: Case) -> None:
    """Compares y, with a gate also the states, and every gradient of `scan` with the oracle."""
    rule, L, D, reverse, reduce, gate, dtype = case
    values = inputs(len(reverse), 1, L, D, 16, rule=rule, gate=gate, state=gate, dtype=getattr(torch, dtype))
    options = dict(rule=rule, reverse=reverse, reduce=reduce, return_state=gate)
    compare(scan, values, TOLERANCE[dtype], **options)
