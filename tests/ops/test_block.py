"""A residual block, at once and in parts, against the float64 oracle."""

import re
from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from native_gemm import needs_amx, products
from oracle import block_inputs, compare, residual_block, value_and_grads
from torch.utils.flop_counter import FlopCounterMode

from vilonghorn.ops import block, mamba_inner, rms_norm
from vilonghorn.ops.backends import cpu as native
from vilonghorn.ops.block import has_fast_block
from vilonghorn.ops.validate import RULES, BlockArguments

NAMES = BlockArguments._fields[:11]
# G, B, L, D, N, R, K, dim
SHAPES = [
    (1, 1, 1, 3, 2, 1, 1, 4),
    (2, 2, 2, 5, 3, 2, 4, 3),
    (2, 1, 63, 40, 16, 3, 4, 50),
    (3, 2, 33, 17, 5, 1, 2, 8),
    (2, 3, 65, 48, 16, 12, 4, 24),
    (1, 7, 40, 33, 64, 5, 7, 16),
]
at_once = pytest.mark.skipif(not has_fast_block(), reason="needs the native CPU library on an x86 processor")


def flags(G):
    return (False, True, True)[:G]


def in_order(A=None, **values):
    """`block` with every tensor by name."""
    return block(A=A, **values)


def in_parts(x, norm_weight, in_proj, out_proj, A=None, *, residual=True, **values):
    branch = F.linear(mamba_inner(F.linear(rms_norm(x, norm_weight), in_proj), A=A, **values), out_proj)
    return x + branch if residual else branch


def operators(function) -> set[str]:
    """Names of our operators that were called."""
    with torch.profiler.profile() as profile:
        function()
    return {
        event.key.removeprefix("vilonghorn::")
        for event in profile.key_averages()
        if event.key.startswith("vilonghorn::")
    }


@at_once
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_agrees_with_the_oracle_on_any_number_of_threads(shape, rule, residual, threads):
    values = block_inputs(*shape, rule=rule)
    compare(in_order, values, 3e-6, truth=residual_block, rule=rule, reverse=flags(shape[0]), residual=residual)


@at_once
@pytest.mark.parametrize("rule", RULES)
def test_it_agrees_with_the_oracle_at_the_size_of_an_image(rule):
    values = block_inputs(2, 1, 197, 384, 16, 12, 4, 192, rule=rule)
    compare(in_order, values, 3e-6, truth=residual_block, rule=rule, reverse=(False, True))


@at_once
@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("rule", RULES)
def test_every_instruction_set_agrees_with_the_oracle(rule, isa):
    values = block_inputs(2, 2, 37, 41, 16, 6, 4, 23, rule=rule)
    with mock.patch.object(native, "_isa", native.isas()[isa]):
        compare(in_order, values, 3e-6, truth=residual_block, rule=rule, reverse=(True, False))
        values = block_inputs(1, 2, 37, 41, 16, 6, 9, 23, rule=rule)
        values["conv_weight"] = values["conv_weight"].unflatten(2, (3, 3))
        compare(in_order, values, 3e-6, truth=residual_block, rule=rule, reverse=(True,), grid=(4, 9))


@needs_amx
@pytest.mark.parametrize("form", ["high", "medium", "autocast"])
def test_its_products_follow_torchs_precision_and_autocast(form):
    values = block_inputs(2, 2, 61, 70, 16, 6, 4, 51, rule="longhorn")
    tolerance = 1e-4 if form == "high" else 2e-2
    exact = in_order(**values)
    with products(form):
        compare(in_order, values, tolerance, truth=residual_block, rule="longhorn", reverse=(False, True))
        shorter = in_order(**values)
    assert shorter.dtype == torch.float32 and not torch.equal(shorter, exact)


@at_once
@settings(max_examples=25, deadline=None)
@given(
    G=st.integers(1, 3),
    B=st.integers(1, 4),
    L=st.integers(1, 70),
    D=st.integers(1, 70),
    dim=st.integers(1, 70),
    N=st.integers(1, 20),
    R=st.integers(1, 9),
    K=st.integers(1, 6),
    rule=st.sampled_from(RULES),
    seed=st.integers(0, 2**31),
)
def test_at_once_it_is_its_parts(G, B, L, D, dim, N, R, K, rule, seed):
    values = block_inputs(G, B, L, D, N, R, K, dim, rule=rule, seed=seed)
    once, parts = (value_and_grads(f, values, rule=rule, reverse=flags(G)) for f in (in_order, in_parts))
    exact = value_and_grads(in_parts, {k: v.double() for k, v in values.items()}, rule=rule, reverse=flags(G))
    for name, truth in exact.items():  # sums that cancel are as inexact in parts
        rounding = 3 * float((parts[name] - truth).abs().max())
        atol = 1e-5 * max(1.0, float(truth.abs().max())) + rounding
        torch.testing.assert_close(once[name], truth, rtol=1e-5, atol=atol)


@at_once
@settings(max_examples=25, deadline=None)
@given(
    G=st.integers(1, 2),
    B=st.integers(1, 4),
    grid=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    class_tokens=st.integers(0, 1),
    D=st.integers(1, 40),
    filters=st.tuples(st.sampled_from([1, 3, 5]), st.sampled_from([1, 3, 5])),
    rule=st.sampled_from(RULES),
    seed=st.integers(0, 2**31),
)
def test_with_a_convolution_over_the_grid_it_agrees_with_the_oracle(G, B, grid, class_tokens, D, filters, rule, seed):
    L, K = grid[0] * grid[1] + class_tokens, filters[0] * filters[1]
    values = block_inputs(G, B, L, D, 5, 2, K, 9, rule=rule, seed=seed)
    values["conv_weight"] = values["conv_weight"].unflatten(2, filters)
    options = dict(rule=rule, reverse=flags(G)[::-1], grid=grid)
    expected, actual = value_and_grads(residual_block, values, **options), value_and_grads(in_order, values, **options)
    for name, truth in expected.items():
        torch.testing.assert_close(actual[name], truth, rtol=1e-4, atol=1e-5 * max(1.0, float(truth.abs().max())))


@at_once
def test_it_is_one_operator():
    values = block_inputs(2, 2, 9, 5, 3, 2, 4, 7, rule="longhorn")
    stages = {f"block/{stage}" for stage in native.FORWARD_STAGES}
    assert operators(lambda: in_order(**values)) == {"block", *stages}


@at_once
def test_a_profile_names_the_stages_and_changes_nothing():
    values = block_inputs(2, 2, 9, 5, 3, 2, 4, 7, rule="longhorn")
    expected = value_and_grads(in_order, values)
    results = []
    seen = operators(lambda: results.append(value_and_grads(in_order, values)))
    assert seen >= {f"block/{stage}" for stage in (*native.FORWARD_STAGES, *native.BACKWARD_STAGES)}
    assert all(torch.equal(results[0][name], expected[name]) for name in expected)


@at_once
def test_what_is_kept_is_what_backward_reads():
    G, B, L, D, N, R, K, dim = 2, 2, 70, 5, 3, 2, 4, 7
    leaves = {
        name: value.requires_grad_() for name, value in block_inputs(G, B, L, D, N, R, K, dim, rule="longhorn").items()
    }
    weights, saved = {id(value) for value in leaves.values()}, []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        in_order(**leaves)
    states = G * B * 2 * N * 16
    assert sorted(t.numel() for t in saved if id(t) not in weights) == sorted(
        [B * L * 2 * D, G * B * L * (R + 2 * N), states]
    )


@at_once
def test_what_is_kept_may_come_back_with_other_strides():
    values = block_inputs(2, 2, 9, 5, 3, 2, 4, 7, rule="mamba")
    expected = value_and_grads(in_order, values, rule="mamba")
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: torch.stack([t, t + 1], -1)[..., 0]):
        actual = value_and_grads(in_order, values, rule="mamba")
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@at_once
@pytest.mark.parametrize("frozen", NAMES)
def test_a_frozen_part_gets_no_gradient(frozen):
    values = block_inputs(2, 2, 9, 5, 3, 2, 4, 7, rule="mamba")
    expected = value_and_grads(in_order, values, rule="mamba")
    leaves = {name: value.clone().requires_grad_(name != frozen) for name, value in values.items()}
    y = in_order(**leaves, rule="mamba")
    cotangent = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).float()
    y.backward(cotangent)
    for name, leaf in leaves.items():
        assert leaf.grad is None if name == frozen else torch.equal(leaf.grad.double(), expected[name])


@at_once
def test_strided_arguments_are_read_as_they_are():
    values = block_inputs(2, 2, 9, 5, 3, 2, 4, 7, rule="mamba")
    strided = {name: value.mT.contiguous().mT if value.dim() > 1 else value for name, value in values.items()}
    first, second = (value_and_grads(in_order, v, rule="mamba") for v in (values, strided))
    assert all(torch.equal(first[name], second[name]) for name in first)


@at_once
def test_a_gradient_that_is_expanded_is_read_as_it_is():
    values = block_inputs(2, 2, 9, 5, 3, 2, 4, 7, rule="longhorn")
    leaves = [value.requires_grad_() for value in values.values()]
    y = in_order(**values)
    first = torch.autograd.grad(y, leaves, torch.ones(()).expand(y.shape), retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(y, leaves, torch.ones(y.shape))))


@at_once
@pytest.mark.parametrize("rule", ["longhorn", "mamba"])
def test_the_operator_passes_torchs_checks(rule):
    values = block_inputs(2, 2, 40, 16, 3, 2, 4, 7, rule=rule)  # 16 channels: see test_scan_operator.py
    leaves = [values[name].requires_grad_() if name in values else None for name in NAMES]
    torch.library.opcheck(
        torch.ops.vilonghorn.block.default, (*leaves, rule, [False, True], 1e-5, True, False, [], True)
    )


@at_once
def test_its_fake_tells_the_strides_of_the_result():
    values = block_inputs(2, 2, 40, 5, 3, 2, 4, 7, rule="longhorn")
    values["x"] = values["x"].mT.contiguous().mT
    args = (*(values.get(name) for name in NAMES), "longhorn", [False, True], 1e-5, True, False, [], False)
    with torch.no_grad():
        torch.library.opcheck(torch.ops.vilonghorn.block.default, args, test_utils="test_faketensor")


@at_once
def test_the_gradients_operator_has_a_fake_that_tells_its_shapes():
    values = block_inputs(2, 2, 40, 5, 3, 2, 4, 7, rule="longhorn")
    args = [values.get(name) for name in NAMES]
    y, *saved = torch.ops.vilonghorn.block(*args, "longhorn", [False, True], 1e-5, True, False, [], True)
    wanted = [name in values and name != "in_proj" for name in NAMES]
    call = (torch.ones_like(y), *saved, *args, "longhorn", [False, True], 1e-5, True, False, [], wanted)
    torch.library.opcheck(
        torch.ops.vilonghorn.block_backward.default, call, test_utils=("test_schema", "test_faketensor")
    )


@at_once
def test_a_second_derivative_is_refused():
    values = {
        name: value.requires_grad_() for name, value in block_inputs(2, 2, 9, 5, 3, 2, 4, 7, rule="longhorn").items()
    }
    (dx,) = torch.autograd.grad(in_order(**values).square().sum(), values["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="can be differentiated once only"):
        dx.sum().backward()


@at_once
def test_a_result_may_be_changed_in_place():
    values = block_inputs(2, 2, 9, 5, 3, 2, 4, 7, rule="longhorn")
    once, twice = value_and_grads(in_order, values), value_and_grads(lambda **v: in_order(**v).mul_(2), values)
    for name in once:
        torch.testing.assert_close(twice[name], 2 * once[name])


@at_once
def test_flops_are_those_of_the_parts():
    values = block_inputs(2, 3, 11, 16, 4, 2, 4, 6, rule="mamba")
    for frozen in (set(), {"in_proj", "out_proj"}):
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
        (dict(rule="gru"), ValueError, "rule is 'gru'"),
        (dict(rule="mamba"), ValueError, "needs A"),
        (dict(norm_weight=torch.ones(5)), ValueError, r"norm_weight has shape \(5,\), expected \(7,\)"),
        (dict(x=torch.zeros(9, 7)), ValueError, r"x has shape \(9, 7\), expected \(B, L, dim\)"),
        (dict(x=torch.zeros(0, 9, 7)), ValueError, r"x has shape \(0, 9, 7\) on cpu, expected tokens on the CPU"),
        (dict(x=torch.zeros(2, 9, 7).double()), TypeError, "x is torch.float64, expected torch.float32"),
        (dict(in_proj=torch.zeros(10, 6)), ValueError, r"in_proj has shape \(10, 6\), expected \(10, 7\)"),
        (dict(dt_bias=torch.zeros(2, 4)), ValueError, "dt_bias has shape"),
        (dict(x_proj=torch.zeros(2, 9, 5)), ValueError, "x_proj has shape"),
        (dict(out_proj=torch.zeros(1, 5)), ValueError, r"out_proj has shape \(1, 5\), expected \(7, 5\)"),
        (dict(reverse=(False,)), ValueError, "reverse has 1 flags for 2 directions"),
        (dict(reverse=(0.5, 1.0)), TypeError, "reverse is .*, expected a tuple with True or False"),
        (dict(D=torch.zeros(2, 5, device="meta")), (ValueError, RuntimeError), "meta"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change, exception, message):
    values = block_inputs(2, 2, 9, 5, 3, 2, 4, 7, rule="longhorn")
    with pytest.raises(exception, match=message):
        in_order(**values | change)


@at_once
@pytest.mark.parametrize("rule", RULES)
def test_repetition_gives_the_same_bits(rule):
    values = block_inputs(2, 3, 70, 40, 16, 3, 4, 20, rule=rule)
    first, second = (value_and_grads(partial(in_order, rule=rule), values) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


GRIDS = {  # of 11 tokens, and what is wrong
    (): "grid is (), expected rows and columns",
    (0, 3): "grid is (0, 3), expected rows and columns",
    (3, 3, 0): "grid is (3, 3, 0), expected rows and columns",
    (3, 4): "11 tokens, expected 12, the patches of a 3 x 4 grid, or 13 with a class token",
    (3, 3): "11 tokens, expected 9, the patches of a 3 x 3 grid, or 10 with a class token",
}


@pytest.mark.parametrize("function", [block, in_parts], ids=["block", "mamba_inner"])
def test_a_grid_that_does_not_fit_is_refused(function):
    if function is block and not has_fast_block():
        pytest.skip("needs the native CPU library")
    values = block_inputs(1, 2, 11, 5, 3, 2, 9, 7, rule="longhorn")
    options = dict(A=None, reverse=(False,))
    values["conv_weight"] = values["conv_weight"].unflatten(2, (3, 3))
    for grid, problem in GRIDS.items():
        with pytest.raises(ValueError, match=re.escape(problem)):
            function(**values, **options, grid=grid)
    values["conv_weight"] = values["conv_weight"][..., :2]
    with pytest.raises(ValueError, match="the filter is 3 x 2, expected an odd height and an odd width"):
        function(**values, **options, grid=(2, 5))


@at_once
def test_the_operator_itself_refuses_a_grid_that_its_kernel_cannot_read():
    values = block_inputs(1, 2, 11, 5, 3, 2, 9, 7, rule="longhorn")
    args = [values.get(name) for name in NAMES]
    for grid in ([3, 3], [4, 4, 3, 3], [2, 5, 3, 1]):
        with pytest.raises(ValueError):
            torch.ops.vilonghorn.block(*args, "longhorn", [False], 1e-5, True, False, grid, False)
