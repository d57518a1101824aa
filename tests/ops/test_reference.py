"""The recurrence in torch's operators, for exports, against the float64 oracle."""

import pytest
import torch
from oracle import KERNEL_RULES, compare, error, flags, inputs, mixer, mixer_inputs, oracle

from vilonghorn.ops.arguments import MixerWeights, ScanArguments
from vilonghorn.ops.exportable import mamba_inner_exportable, scan_exportable

# G, B, L, D, N, R, K
SHAPES = [(1, 1, 1, 1, 1, 1, 1), (2, 2, 2, 5, 3, 2, 4), (3, 2, 33, 17, 5, 1, 2), (2, 1, 63, 40, 16, 3, 4)]
TOLERANCE = {torch.float32: 4e-6, torch.float64: 1e-12}


def exportable_mix(xz, *, rule, reverse, **weights):
    return mamba_inner_exportable(xz, MixerWeights(**weights), None, rule, reverse, None)


def exportable_scan(**values):
    return scan_exportable(ScanArguments(**values))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rule", (*KERNEL_RULES, "none"))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_exportable_mixer_agrees_with_the_oracle(shape, rule, dtype):
    values = mixer_inputs(*shape, rule=rule, dtype=dtype)
    compare(exportable_mix, values, TOLERANCE[dtype], truth=mixer, rule=rule, reverse=flags(shape[0]))


@pytest.mark.parametrize("reduce", ["none", "mean"])
@pytest.mark.parametrize("gate", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("rule", KERNEL_RULES)
def test_the_exportable_scan_agrees_with_the_oracle(rule, gate, reduce):
    values = inputs(2, 2, 19, 6, 4, rule=rule, gate=gate, dtype=torch.float64)
    compare(exportable_scan, values, 1e-12, rule=rule, reverse=(True, False), reduce=reduce)


def test_autocast_does_not_shorten_the_states_of_the_exportable_scan():
    values = inputs(1, 2, 200, 8, 16, rule="longhorn", dtype=torch.bfloat16)
    expected = oracle(**values, rule="longhorn", reverse=(False,))
    with torch.autocast("cpu", torch.bfloat16):
        y = exportable_scan(**values, rule="longhorn", reverse=(False,), reduce="none")
    assert y.dtype == torch.bfloat16
    assert error(y, expected) < 4e-3  # of rounding y; a bfloat16 state would be off by more than 1e-2
