"""The CUDA convolution without a GPU: its own source, compiled for the emulator in `kernels/`, against the oracle."""

from functools import partial

import pytest
import torch
from convolutions import *  # noqa: F403
from convolutions import CASES, check
from oracle import conv_inputs, value_and_grads

from vilonghorn.ops import conv_silu
from vilonghorn.ops.backends import cpu, cuda
from vilonghorn.ops.conv import conv2d_silu

pytestmark = pytest.mark.usefixtures("emulator")
emulated = partial(conv_silu, backend="cuda")
LARGE = [((2, 1, 197, 384, 4), (False, True)), ((2, 1, 90, 3, 64), (False, True))]  # an image, and the most taps


@pytest.fixture
def backend() -> str:
    return "cuda"


@pytest.mark.parametrize("dtype", cuda.DTYPES, ids=str)
@pytest.mark.parametrize("shape, reverse", [*CASES, *LARGE], ids=str)
def test_the_kernels_agree_with_the_oracle(shape, reverse, dtype):
    check("cuda", shape, reverse, dtype)


@pytest.mark.parametrize(("tokens", "channels"), [(15, 16), (16, 5)], ids=str)
def test_a_convolution_over_the_grid_runs_the_kernel(tokens, channels, monkeypatch):
    x, weight, bias = conv_inputs(2, 2, tokens, channels, 9).values()
    values = dict(x=x, weight=weight.unflatten(2, (3, 3)), bias=bias)
    run = partial(conv2d_silu, grid=(3, 5))  # of 16 tokens, one is a class token
    expected = value_and_grads(run, {name: value.double() for name, value in values.items()})
    monkeypatch.setattr(cpu, "_reason", "not built")
    launched, forward = [], cuda.conv_forward
    monkeypatch.setattr(cuda, "conv_forward", lambda args: launched.append(1) or forward(args))
    actual = value_and_grads(run, values)
    assert launched
    for name, value in expected.items():
        torch.testing.assert_close(actual[name].double(), value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(2, 3, 37, 40, 4), (3, 2, 37, 5, 3)], ids=str)
def test_results_are_bitwise_equal_whatever_the_order_of_the_threads(shape):
    run = partial(value_and_grads, emulated, conv_inputs(*shape), reverse=(False, True, True)[: shape[0]])
    first, second = run(), run()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_slice_is_read_in_place(monkeypatch):
    x, weight, bias = conv_inputs(2, 2, 5, 8, 4).values()
    wide = torch.cat([x, x], -1)
    monkeypatch.setattr(torch.Tensor, "clone", None)
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda t: t if t.is_contiguous() else pytest.fail("copied"))
    assert emulated(wide[..., 8:], weight, bias, reverse=(False, True)).isfinite().all()


def test_weights_that_are_not_aligned_are_read_right():
    values = conv_inputs(2, 1, 9, 8, 4)
    expected = emulated(**values, reverse=(False, True))
    values["weight"] = torch.cat([torch.zeros(1), values["weight"].flatten()])[1:].view(2, 8, 4)
    torch.testing.assert_close(emulated(**values, reverse=(False, True)), expected, rtol=1e-6, atol=1e-6)


def test_compiled_equals_eager_in_one_graph_that_chooses_the_kernel(monkeypatch):
    monkeypatch.setattr(cpu, "_reason", "not built")
    torch._dynamo.reset()
    values, run = conv_inputs(2, 2, 9, 8, 4), partial(conv_silu, reverse=(False, True))
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    expected, actual = value_and_grads(emulated, values, reverse=(False, True)), value_and_grads(compiled, values)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_an_error_of_the_runtime_is_raised_with_its_text():
    with pytest.raises(RuntimeError, match="conv_silu: the CUDA kernel could not run: invalid argument"):
        emulated(**conv_inputs(1, 1, 3, 4, 4, torch.float64))
