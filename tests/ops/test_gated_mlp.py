"""A gated MLP with its norm, against the float64 oracle."""

from functools import partial
from unittest import mock

import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_gemm import needs_amx, products
from oracle import compare, mlp_inputs, value_and_grads

from vilonghorn.ops import gated_mlp
from vilonghorn.ops.backends import cpu as native

pytestmark = pytest.mark.skipif(native.unavailable("cpu") is not None, reason="needs the native CPU library")
hold = partial(compare, gated_mlp, tolerance=3e-6, truth=oracle.gated_mlp)


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("shape, hidden", [((1, 1, 2), 1), ((2, 197, 96), 264), ((300, 40), 3), ((1, 2, 2, 17), 65)])
def test_it_agrees_with_the_oracle_on_any_number_of_threads(shape, hidden, residual, threads):
    hold(mlp_inputs(*shape, hidden=hidden), residual=residual)


@pytest.mark.parametrize("isa", native.isas())
def test_every_instruction_set_agrees_with_the_oracle(isa):
    with mock.patch.object(native, "_isa", native.isas()[isa]):
        hold(mlp_inputs(3, 41, 23, hidden=37))


@settings(max_examples=25, deadline=None)
@given(tokens=st.integers(1, 300), dim=st.integers(1, 70), hidden=st.integers(1, 130), seed=st.integers(0, 2**31))
def test_it_agrees_with_the_oracle_at_any_size(tokens, dim, hidden, seed):
    values = mlp_inputs(tokens, dim, hidden=hidden, seed=seed)
    expected, actual = value_and_grads(oracle.gated_mlp, values), value_and_grads(gated_mlp, values)
    for name, truth in expected.items():
        torch.testing.assert_close(actual[name], truth, rtol=1e-5, atol=1e-5 * max(1.0, float(truth.abs().max())))


@needs_amx
@pytest.mark.parametrize("form", ["high", "medium", "autocast"])
def test_its_products_follow_torchs_precision_and_autocast(form):
    values = mlp_inputs(150, 41, hidden=70)
    exact = gated_mlp(**values)
    with products(form):
        compare(gated_mlp, values, 1e-4 if form == "high" else 2e-2, truth=oracle.gated_mlp)
        shorter = gated_mlp(**values)
    assert shorter.dtype == torch.float32 and not torch.equal(shorter, exact)


def test_without_gradients_the_result_is_the_same():
    values = mlp_inputs(2, 100, 24, hidden=30)
    expected = gated_mlp(**{name: value.requires_grad_() for name, value in values.items()})
    with torch.no_grad():
        assert torch.equal(gated_mlp(**values), expected)


def test_gradients_that_nobody_wants_are_left_out():
    values = mlp_inputs(5, 8, hidden=6)
    wanted = value_and_grads(gated_mlp, values)["x"]
    x = values["x"].requires_grad_()
    y = gated_mlp(**values)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(y))
    assert torch.equal(x.grad.double(), wanted) and values["in_proj"].grad is None


def test_a_tensor_that_does_not_fit_is_named():
    values = mlp_inputs(5, 8, hidden=6)
    with pytest.raises(ValueError, match=r"in_proj has shape \(12, 7\), expected \(12, 8\) to go with x \(5, 8\)"):
        gated_mlp(**values | dict(in_proj=torch.randn(12, 7)))
    with pytest.raises(ValueError, match=r"out_proj has shape \(9, 6\), expected \(8, 6\)"):
        gated_mlp(**values | dict(out_proj=torch.randn(9, 6)))
    with pytest.raises(ValueError, match=r"x has shape \(0, 8\) on cpu, expected tokens on the CPU"):
        gated_mlp(**values | dict(x=torch.randn(0, 8)))
    with pytest.raises(TypeError, match="x is torch.float64, expected torch.float32"):
        gated_mlp(**values | dict(x=values["x"].double()))
    with pytest.raises(ValueError, match=r"out_proj \(8, 0\), expected"):
        gated_mlp(values["x"], values["norm_weight"], torch.randn(0, 8), torch.randn(8, 0))
    with pytest.raises(ValueError, match=r"x has shape \(\) and"):
        gated_mlp(**values | dict(x=torch.randn(())))
