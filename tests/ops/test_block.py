"""A residual block, at once and in parts, against the float64 oracle."""

import math
import re
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import needs_amx, needs_fused
from native_gemm import products
from oracle import KERNEL_RULES, block_inputs, compare, flags, residual_block, value_and_grads
from torch.utils.flop_counter import FlopCounterMode

from vilonghorn.ops import block, mamba_inner, rms_norm
from vilonghorn.ops.arguments import LAYOUTS, BlockArguments
from vilonghorn.ops.backends import cpu as native

NAMES = LAYOUTS[BlockArguments].tensors
OPTIONS = ([False, True], 1e-5, 1e-5, False, [])  # of the operator, after the rule
# G, B, L, D, N, R, K, dim, hidden
SHAPES = [
    (1, 1, 1, 3, 2, 1, 1, 4, 0),
    (2, 2, 2, 5, 3, 2, 4, 3, 1),
    (2, 1, 63, 40, 16, 3, 4, 50, 0),
    (3, 2, 33, 17, 5, 1, 2, 8, 65),
    (2, 3, 65, 48, 16, 12, 4, 24, 7),
    (1, 7, 40, 33, 64, 5, 7, 16, 0),
]
RULES_AND_NONE = (*KERNEL_RULES, "none")
pytestmark = needs_fused


def full(values) -> dict:
    """The arguments of `block`, with None for those absent."""
    return dict.fromkeys(NAMES) | values


def in_order(**values):
    return block(**full(values))


def infer(values, isa, threads, **options):
    """The operator without gradients, on an instruction set and a number of threads."""
    before = torch.get_num_threads()
    with mock.patch.object(native, "_isa", isa), torch.no_grad():
        torch.set_num_threads(threads)
        try:
            return in_order(**values, **options)
        finally:
            torch.set_num_threads(before)


def in_parts(x, norm_weight, in_proj, out_proj, mlp_norm_weight=None, mlp_in_proj=None, mlp_out_proj=None, **inner):
    x = x + F.linear(mamba_inner(F.linear(rms_norm(x, norm_weight), in_proj), **inner), out_proj)
    if mlp_in_proj is None:
        return x
    gate, value = F.linear(rms_norm(x, mlp_norm_weight), mlp_in_proj).chunk(2, -1)
    return x + F.linear(F.silu(gate) * value, mlp_out_proj)


def small(rule="longhorn", hidden=0):
    return block_inputs(2, 2, 9, 5, 3, 2, 4, 7, hidden=hidden, rule=rule)


@pytest.mark.parametrize("rule", RULES_AND_NONE)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_agrees_with_the_oracle_on_any_number_of_threads(shape, rule, threads):
    *sizes, hidden = shape
    values = block_inputs(*sizes, hidden=hidden, rule=rule)
    compare(in_order, values, 3e-6, truth=residual_block, rule=rule, reverse=flags(shape[0]))


@pytest.mark.parametrize("rule, hidden", [("longhorn", 0), ("longhorn_exact", 264), ("mamba", 0), ("none", 0)])
def test_it_agrees_with_the_oracle_at_the_size_of_an_image(rule, hidden):
    values = block_inputs(2, 1, 197, 384, 16, 12, 4, 192, hidden=hidden, rule=rule)
    compare(in_order, values, 3e-6, truth=residual_block, rule=rule, reverse=(False, True))


@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("rule", RULES_AND_NONE)
def test_every_instruction_set_agrees_with_the_oracle(rule, isa):
    with mock.patch.object(native, "_isa", native.isas()[isa]):
        values = block_inputs(2, 2, 37, 41, 16, 6, 4, 23, hidden=37, rule=rule)
        compare(in_order, values, 3e-6, truth=residual_block, rule=rule, reverse=(True, False))
        values = block_inputs(1, 2, 37, 41, 3, 6, 9, 23, rule=rule, filters=(3, 3))
        compare(in_order, values, 3e-6, truth=residual_block, rule=rule, reverse=(True,), grid=(4, 9))


@given(
    B=st.integers(1, 9),
    grid=st.tuples(st.integers(1, 20), st.integers(1, 150)),
    filters=st.tuples(st.sampled_from([1, 3, 5]), st.sampled_from([1, 3, 5])),
    D=st.integers(1, 50),
    hidden=st.sampled_from([0, 7]),
    isa=st.sampled_from(list(native.isas().values())),
    threads=st.integers(1, 4),
    seed=st.integers(0, 2**31),
)
def test_inference_without_a_scan_goes_through_the_rows_of_a_map(B, grid, filters, D, hidden, isa, threads, seed):
    sizes = 1, B, math.prod(grid), D, 16, 3, math.prod(filters), 9
    values = block_inputs(*sizes, hidden=hidden, seed=seed, rule="none", filters=filters)
    options = dict(rule="none", reverse=(False,), grid=grid)
    actual = infer(values, isa, threads, **options)
    expected = residual_block(**{name: value.double() for name, value in values.items()}, **options)
    torch.testing.assert_close(actual.double(), expected, rtol=3e-5, atol=3e-5)


@settings(max_examples=20)
@given(
    B=st.integers(1, 3),
    grid=st.sampled_from([(90, 47), (66, 64), (9, 700), (5, 2048), (7, 2051), (4201, 1)]),
    filters=st.sampled_from([(1, 1), (3, 3), (5, 1), (1, 3), (3, 5)]),
    D=st.integers(1, 33),
    hidden=st.sampled_from([0, 7]),
    rule=st.sampled_from(KERNEL_RULES),
    reverse=st.booleans(),
    isa=st.sampled_from(list(native.isas().values())),
    threads=st.integers(1, 4),
    seed=st.integers(0, 2**31),
)
def test_inference_scans_the_rows_of_a_large_map_in_strips(
    B, grid, filters, D, hidden, rule, reverse, isa, threads, seed
):
    sizes = 1, B, math.prod(grid), D, 3, 2, math.prod(filters), 5
    values = block_inputs(*sizes, hidden=hidden, seed=seed, rule=rule, filters=filters)
    options = dict(rule=rule, reverse=(reverse,), grid=grid)
    actual = infer(values, isa, threads, **options)
    with torch.no_grad():
        parts = in_parts(**values, **options)
        expected = in_parts(**{name: value.double() for name, value in values.items()}, **options)
    atol = 3e-5 + 3 * float((parts - expected).abs().max())  # sums that cancel are as inexact in parts
    torch.testing.assert_close(actual.double(), expected, rtol=3e-5, atol=atol)


@needs_amx
@pytest.mark.parametrize("precision", ["high", "medium", "autocast"])
def test_its_products_follow_torchs_precision_and_autocast(precision):
    values = block_inputs(2, 2, 61, 70, 16, 6, 4, 51, hidden=70)
    exact = in_order(**values)
    with products(precision):
        tolerance = 1e-4 if precision == "high" else 2e-2
        compare(in_order, values, tolerance, truth=residual_block, rule="longhorn", reverse=(False, True))
        shorter = in_order(**values)
    assert shorter.dtype == torch.float32 and not torch.equal(shorter, exact)


@given(
    G=st.integers(1, 3),
    B=st.integers(1, 4),
    L=st.integers(1, 70),
    heads=st.tuples(st.integers(1, 5), st.integers(1, 35)),
    dim=st.integers(1, 70),
    N=st.integers(1, 20),
    R=st.integers(1, 9),
    K=st.integers(1, 6),
    hidden=st.integers(0, 80),
    rule=st.sampled_from(RULES_AND_NONE),
    seed=st.integers(0, 2**31),
)
def test_at_once_it_is_its_parts(G, B, L, heads, dim, N, R, K, hidden, rule, seed):
    H, D = heads[0] if rule.startswith("longhorn") else None, heads[0] * heads[1]
    values = block_inputs(G, B, L, D, N, R, K, dim, hidden=hidden, rule=rule, heads=H, seed=seed)
    once, parts = (value_and_grads(f, values, rule=rule, reverse=flags(G)) for f in (in_order, in_parts))
    exact = value_and_grads(in_parts, {k: v.double() for k, v in values.items()}, rule=rule, reverse=flags(G))
    for name, truth in exact.items():  # sums that cancel are as inexact in parts
        rounding = 3 * float((parts[name] - truth).abs().max())
        atol = 1e-5 * max(1.0, float(truth.abs().max())) + rounding
        torch.testing.assert_close(once[name], truth, rtol=1e-5, atol=atol)


@given(
    G=st.integers(1, 2),
    B=st.integers(1, 4),
    grid=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    class_tokens=st.integers(0, 1),
    D=st.integers(1, 40),
    filters=st.tuples(st.sampled_from([1, 3, 5]), st.sampled_from([1, 3, 5])),
    rule=st.sampled_from(RULES_AND_NONE),
    seed=st.integers(0, 2**31),
)
def test_with_a_convolution_over_the_grid_it_agrees_with_the_oracle(G, B, grid, class_tokens, D, filters, rule, seed):
    L, K = grid[0] * grid[1] + class_tokens, filters[0] * filters[1]
    values = block_inputs(G, B, L, D, 5, 2, K, 9, rule=rule, filters=filters, seed=seed)
    options = dict(rule=rule, reverse=flags(G)[::-1], grid=grid)
    expected, actual = value_and_grads(residual_block, values, **options), value_and_grads(in_order, values, **options)
    for name, truth in expected.items():
        torch.testing.assert_close(actual[name], truth, rtol=1e-4, atol=1e-5 * max(1.0, float(truth.abs().max())))


@pytest.mark.parametrize("rule", ["longhorn_exact", "none"])
@pytest.mark.parametrize("hidden", [0, 11])
def test_drop_scales_are_factors_of_each_samples_branches(hidden, rule, threads):
    values = block_inputs(2, 4, 35, 12, 3, 2, 4, 10, hidden=hidden, rule=rule)
    scales = torch.tensor([[0.0, 2.0, 0.0, 1.25], [2.0, 0.0, 0.0, 1.25]][: 1 + (hidden > 0)])
    options = dict(rule=rule, reverse=(False, True), drop_scales=scales)
    compare(in_order, values, 3e-6, truth=residual_block, **options)
    y = in_order(**values, **options)
    assert torch.equal(y[2], values["x"][2])  # every branch is dropped
    ones = in_order(**values, **options | dict(drop_scales=torch.ones_like(scales)))
    torch.testing.assert_close(ones, in_order(**values, rule=rule))


def test_a_profile_names_the_stages_and_changes_nothing():
    values, results = small(hidden=3), []
    expected = value_and_grads(in_order, values)
    with torch.profiler.profile() as profile:
        results.append(value_and_grads(in_order, values))
    seen = {event.key.removeprefix("vilonghorn::") for event in profile.key_averages()}
    assert seen >= {f"block/{stage}" for stage in (*native.FORWARD_STAGES, *native.BACKWARD_STAGES)}
    assert all(torch.equal(results[0][name], expected[name]) for name in expected)


@pytest.mark.parametrize("hidden", [0, 3])
def test_what_is_kept_is_what_backward_reads(hidden):
    G, B, L, D, N, R, K, dim = 2, 2, 70, 5, 3, 2, 4, 7
    leaves = {n: v.requires_grad_() for n, v in block_inputs(G, B, L, D, N, R, K, dim, hidden=hidden).items()}
    weights, saved = {id(value) for value in leaves.values()}, []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        in_order(**leaves)
    expected = [B * L * 2 * D, G * B * L * (R + 2 * N), G * B * 2 * N * 16]
    expected += [B * L * dim, B * L * 2 * hidden] if hidden else [0, 0]
    assert sorted(t.numel() for t in saved if id(t) not in weights) == sorted(expected)


@pytest.mark.parametrize("frozen", NAMES[:14])
def test_a_frozen_part_gets_no_gradient(frozen):
    values = small("mamba", hidden=3)
    expected = value_and_grads(in_order, values, rule="mamba")
    leaves = {name: value.clone().requires_grad_(name != frozen) for name, value in values.items()}
    y = in_order(**leaves, rule="mamba")
    cotangent = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).float()
    y.backward(cotangent)
    for name, leaf in leaves.items():
        assert leaf.grad is None if name == frozen else torch.equal(leaf.grad.double(), expected[name])


def test_strided_arguments_and_gradients_are_read_as_they_are():
    values = small("mamba", hidden=3)
    strided = {name: value.mT.contiguous().mT if value.dim() > 1 else value for name, value in values.items()}
    first, second = (value_and_grads(in_order, v, rule="mamba") for v in (values, strided))
    assert all(torch.equal(first[name], second[name]) for name in first)
    leaves = [value.requires_grad_() for value in values.values()]
    y = in_order(**values, rule="mamba")
    grads = torch.autograd.grad(y, leaves, torch.ones(()).expand(y.shape), retain_graph=True)
    assert all(map(torch.equal, grads, torch.autograd.grad(y, leaves, torch.ones(y.shape))))


@pytest.mark.parametrize("rule, hidden", [("longhorn", 3), ("mamba", 0), ("none", 3)])
def test_the_operator_passes_torchs_checks(rule, hidden):
    values = block_inputs(2, 2, 40, 16, 3, 2, 4, 7, hidden=hidden, rule=rule)  # 16 channels: see test_scan_operator.py
    leaves = [value if value is None else value.requires_grad_() for value in full(values).values()]
    torch.library.opcheck(torch.ops.vilonghorn.block.default, (*leaves, rule, *OPTIONS, True))
    values["x"] = values["x"].detach().mT.contiguous().mT
    args = (*full(values).values(), rule, *OPTIONS, False)
    with torch.no_grad():
        torch.library.opcheck(torch.ops.vilonghorn.block.default, args, test_utils="test_faketensor")


def test_flops_are_those_of_the_parts():
    values = block_inputs(2, 3, 11, 16, 4, 2, 4, 6, hidden=5, rule="mamba")
    for frozen in (set(), {"in_proj", "out_proj", "mlp_in_proj"}):
        leaves = {name: value.clone().requires_grad_(name not in frozen) for name, value in values.items()}
        counts = []
        for function in (in_order, in_parts):
            for backward in (False, True):
                with FlopCounterMode(display=False) as counter:
                    y = function(**leaves, rule="mamba", reverse=(False, True))
                    if backward:
                        y.sum().backward()
                counts.append(counter.get_total_flops())
        assert counts[:2] == counts[2:]


@pytest.mark.parametrize(
    "change, exception, message",
    [
        (dict(rule="none"), TypeError, "x_proj is given; rule 'none' takes no weights of a scan"),
        (dict(norm_weight=torch.ones(5)), ValueError, r"norm_weight has shape \(5,\), expected \(7,\)"),
        (dict(x=torch.zeros(9, 7)), ValueError, r"x has shape \(9, 7\), expected \(B, L, dim\)"),
        (dict(x=torch.zeros(0, 9, 7)), ValueError, r"x has shape \(0, 9, 7\) on cpu, expected tokens on the CPU"),
        (dict(x=torch.zeros(2, 9, 7).double()), TypeError, "x is torch.float64, expected torch.float32"),
        (dict(in_proj=torch.zeros(10, 6)), ValueError, r"in_proj has shape \(10, 6\), expected \(10, 7\)"),
        (dict(mlp_in_proj=None), ValueError, "some weights of the MLP are None"),
        (dict(mlp_in_proj=torch.zeros(6, 8)), ValueError, r"mlp_in_proj has shape \(6, 8\), expected \(6, 7\)"),
        (dict(drop_scales=torch.ones(1, 2)), ValueError, "drop_scales has 1 rows"),
        (dict(drop_scales=torch.ones(2, 3)), ValueError, r"drop_scales has shape \(2, 3\), expected \(2, 2\)"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change, exception, message):
    with pytest.raises(exception, match=message):
        in_order(**small(hidden=3) | change)


@pytest.mark.parametrize("rule", RULES_AND_NONE)
def test_repetition_gives_the_same_bits(rule):
    values = block_inputs(2, 3, 70, 40, 16, 3, 4, 20, hidden=9, rule=rule)
    first, second = (value_and_grads(in_order, values, rule=rule) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


GRIDS = {  # of 11 tokens, and what is wrong
    (): "grid is (), expected rows and columns",
    (0, 3): "grid is (0, 3), expected rows and columns",
    (3, 3, 0): "grid is (3, 3, 0), expected rows and columns",
    (3, 4): "11 tokens, expected 12, the patches of a 3 x 4 grid, or 13 with a class token",
    (3, 3): "11 tokens, expected 9, the patches of a 3 x 3 grid, or 10 with a class token",
}


@pytest.mark.parametrize("function", [in_order, in_parts], ids=["block", "mamba_inner"])
def test_a_grid_that_does_not_fit_is_refused(function):
    values = block_inputs(1, 2, 11, 5, 3, 2, 9, 7, filters=(3, 3))
    for grid, problem in GRIDS.items():
        with pytest.raises(ValueError, match=re.escape(problem)):
            function(**values, reverse=(False,), grid=grid)
    values["conv_weight"] = values["conv_weight"][..., :2]
    with pytest.raises(ValueError, match="the filter is 3 x 2, expected an odd height and an odd width"):
        function(**values, reverse=(False,), grid=(2, 5))


def test_the_operator_itself_refuses_a_grid_that_its_kernel_cannot_read():
    args = full(block_inputs(1, 2, 11, 5, 3, 2, 9, 7)).values()
    for grid in ([3, 3], [4, 4, 3, 3], [2, 5, 3, 1]):
        with pytest.raises(ValueError):
            torch.ops.vilonghorn.block(*args, "longhorn", [False], 1e-5, 1e-5, False, grid, False)
