"""All that a mixer does after its input projection, fused and composed, against the float64 oracle."""

from unittest import mock

import pytest
import torch
from flat_arguments import from_tensors
from marks import needs_native
from oracle import KERNEL_RULES, compare, flags, mixer, mixer_inputs

from vilonghorn.ops import mamba_inner
from vilonghorn.ops.arguments import LAYOUTS, MambaInnerArguments
from vilonghorn.ops.backends import cpu as native
from vilonghorn.ops.mamba_inner import mamba_inner_composed

NAMES = LAYOUTS[MambaInnerArguments].tensors
# G, B, L, D, N, R, K
SHAPES = [
    (1, 1, 1, 1, 1, 1, 1),
    (2, 2, 2, 5, 3, 2, 4),
    (2, 1, 63, 40, 16, 3, 4),
    (3, 2, 33, 17, 5, 1, 2),
    (2, 3, 65, 48, 16, 12, 4),
    (1, 1, 140, 33, 64, 5, 7),
    (2, 1, 197, 384, 16, 12, 4),
]
RULES_AND_NONE = (*KERNEL_RULES, "none")
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-12}


def composed(rule, reverse, **tensors):
    args = from_tensors(MambaInnerArguments, tensors, rule, reverse, [], False)
    return mamba_inner_composed(args, backend="reference")


@needs_native
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rule", RULES_AND_NONE)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_fused_mixer_agrees_with_the_oracle(shape, rule, dtype):
    torch.set_num_threads(5 if dtype == torch.float32 else 1)  # test_block.py has both
    values = mixer_inputs(*shape, rule=rule, dtype=dtype)
    compare(mamba_inner, values, TOLERANCE[dtype], truth=mixer, rule=rule, reverse=flags(shape[0]))


@pytest.mark.parametrize("rule", RULES_AND_NONE)
@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_the_composed_mixer_agrees_with_the_oracle(shape, rule):
    values = mixer_inputs(*shape, rule=rule, dtype=torch.float64)
    compare(composed, values, 1e-12, truth=mixer, rule=rule, reverse=flags(shape[0]))


@needs_native
@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize(
    "rule, channels, heads",
    [
        ("longhorn", 90, 3),
        ("longhorn_exact", 40, 8),
        ("longhorn_exact", 33, 1),
        ("longhorn", 64, 2),
        ("longhorn", 7, 7),
    ],
)
def test_heads_that_share_dt_agree_with_the_oracle(rule, channels, heads, isa):
    values = mixer_inputs(2, 1, 70, channels, 16, 3, 4, rule=rule, heads=heads)
    with mock.patch.object(native, "_isa", native.isas()[isa]):
        compare(mamba_inner, values, 6e-6, truth=mixer, rule=rule, reverse=(True, False))  # few heads: long sums cancel


@needs_native
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("rule", RULES_AND_NONE)
def test_with_heads_over_a_grid_short_storage_costs_the_rounding_of_what_is_stored(rule, dtype, tolerance, threads):
    weights = torch.float64 if dtype == torch.float64 else torch.float32
    values = mixer_inputs(3, 2, 45, 42, 16, 3, 9, rule=rule, heads=7, filters=(3, 3), dtype=weights)
    values["xz"] = values["xz"].to(dtype)
    options = dict(rule=rule, reverse=flags(3), grid=(9, 5))
    compare(mamba_inner, values, tolerance, truth=mixer, **options)
    wide = {name: value.to(weights) for name, value in values.items()}
    y, exact = (mamba_inner(**v, **options) for v in (values, wide))
    assert torch.equal(y, exact.to(dtype)), "the arithmetic is that of the weights' type, rounded once"


@needs_native
def test_what_lies_around_a_strided_input_does_not_matter():
    values = mixer_inputs(2, 2, 9, 5, 3, 2, 4, rule="longhorn")
    wide = torch.full((2, 9, 3, 10), float("nan"))
    wide[:, :, 1] = values["xz"]
    options = dict(rule="longhorn", reverse=(False, True))
    assert torch.equal(mamba_inner(**values, **options), mamba_inner(**values | {"xz": wide[:, :, 1]}, **options))


@needs_native
@pytest.mark.parametrize("B, L", [(0, 3), (2, 0)])
def test_without_tokens_the_gradients_of_weights_are_zero(B, L):
    values = mixer_inputs(2, B, L, 5, 3, 2, 4, rule="mamba")
    leaves = [values[name].requires_grad_() for name in NAMES]
    for leaf, grad in zip(leaves, torch.autograd.grad(mamba_inner(*leaves, rule="mamba").sum(), leaves)):
        assert grad.shape == leaf.shape and not grad.any()


@needs_native
@pytest.mark.parametrize("rule", ["longhorn", "mamba"])
def test_the_operator_passes_torchs_checks(rule):
    values = mixer_inputs(2, 2, 40, 16, 3, 2, 4, rule=rule)  # 16 channels: see test_scan_operator.py
    leaves = [values[name].requires_grad_() if name in values else None for name in NAMES]
    torch.library.opcheck(torch.ops.vilonghorn.mamba_inner_cpu.default, (*leaves, rule, [False, True], [], False, True))


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(dt_proj=torch.zeros(2, 4, 2)), "mamba_inner: dt has 4 heads, expected a divisor of the 5 channels"),
        (dict(xz=torch.zeros(2, 9, 10).long()), "xz is torch.int64"),
        (dict(xz=torch.zeros(2, 9, 11)), r"xz has shape \(2, 9, 11\), expected \(2, 9, 10\)"),
        (dict(dt_bias=torch.zeros(2, 4)), "dt_bias has shape"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change, message):
    values = mixer_inputs(2, 2, 9, 5, 3, 2, 4, rule="longhorn") | dict(rule="longhorn", reverse=(False, True))
    with pytest.raises((ValueError, TypeError), match=message):
        mamba_inner(**values | change)
