"""The CPU library refuses sizes that its kernels do not take, before one runs: these calls have no memory."""

import pytest
from marks import needs_native

from vilonghorn.ops.backends import cpu
from vilonghorn.ops.backends.bindings import CONV, MAMBA_INNER, SCAN

pytestmark = needs_native


SIZES = dict(directions=1, batch=1, length=9, channels=4, states=3, chunk=64, channel_splits=1)


def scan(**changes) -> bytes:
    return SCAN.pack(SIZES | changes)


def mixer(**changes) -> bytes:
    return MAMBA_INNER.pack({**SIZES, **dict(d_conv=9, num_heads=2, rows=2, columns=4, height=3), **changes})


@pytest.mark.parametrize(
    "name, struct, reason",
    [
        ("scan", scan(states=65), "states is 65, expected 1 to 64"),
        ("scan", scan(states=0), "states is 0, expected 1 to 64"),
        ("scan", scan(rule=2), "A is missing, with rule mamba"),
        ("scan", scan(A=64), "A is given, with rule longhorn"),
        ("scan", scan(rule=9), "the kernels do not implement this rule"),
        ("scan", scan(rule=3), "the kernels do not implement this rule"),
        ("scan", scan(dtype=2), "dtype is 2, expected 0 to 1"),
        ("scan", scan(length=-1), "length is -1, expected 0 or more"),
        ("scan", scan(chunk=0), "chunk is 0, expected 1 or more"),
        ("scan", scan(directions=0), "directions is 0, expected 1 or more"),
        ("mamba_inner", mixer(states=200), "states is 200, expected 1 to 64"),
        ("mamba_inner", mixer(rule=3), "states is 3, expected 0"),
        ("mamba_inner", mixer(d_conv=65), "d_conv is 65, expected 1 to 64"),
        ("mamba_inner", mixer(num_heads=3), "num_heads is 3, expected a divisor of the 4 channels"),
        ("mamba_inner", mixer(columns=3), "the number of tokens beside the grid is 3, expected 0 to 1"),
        ("mamba_inner", mixer(height=2), "the filter has 2 rows and 9 taps, expected odd sides"),
        ("mamba_inner", mixer(rows=2**40), f"rows is {2**40}, expected 1 to 9"),
        ("conv", CONV.pack(dict(directions=1, batch=1, length=9, channels=4)), "d_conv is 0, expected 1 to 64"),
    ],
)
def test_a_size_that_no_kernel_takes_is_refused_and_named(name, struct, reason):
    for step in ("forward", "backward"):
        error = getattr(cpu.library, f"vl_{name}_{step}")(struct, -1)
        assert error < 0 and cpu.library.vl_error(error).decode() == reason
