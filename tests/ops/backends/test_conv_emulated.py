"""The CUDA convolution without a GPU: its own source, compiled for the emulator in `kernels/`, against the oracle."""

from functools import partial

import pytest
import torch
from convolutions import CASES, check
from oracle import compare, conv_inputs, convolution, value_and_grads

from vilonghorn.ops import conv_silu
from vilonghorn.ops.arguments import ConvArguments
from vilonghorn.ops.backends import cpu, cuda
from vilonghorn.ops.conv import conv2d_silu

pytestmark = pytest.mark.usefixtures("emulator")
emulated = partial(conv_silu, backend="cuda")
LARGE = [((2, 1, 197, 384, 4), (False, True))]  # an image


@pytest.mark.parametrize("dtype", cuda.DTYPES, ids=str)
@pytest.mark.parametrize("shape, reverse", [*CASES, *LARGE], ids=str)
def test_the_kernels_agree_with_the_oracle(shape, reverse, dtype):
    check("cuda", shape, reverse, dtype)


# Where there is one token more than patches, it is a class token. A row of 70 patches has several segments.
@pytest.mark.parametrize(
    ("G", "tokens", "channels", "grid", "in_kernel"),
    [
        (1, 15, 16, (3, 5), True),
        (1, 15, 5, (3, 5), True),
        (1, 210, 8, (3, 70), True),
        (1, 140, 6, (2, 70), True),
        (1, 16, 8, (3, 5), False),
        (2, 15, 8, (3, 5), False),
    ],
    ids=str,
)
def test_a_convolution_over_the_grid_runs_the_kernel(G, tokens, channels, grid, in_kernel, monkeypatch):
    x, weight, bias = conv_inputs(G, 2, tokens, channels, 9).values()
    values = dict(x=x, weight=weight.unflatten(2, (3, 3)), bias=bias)
    run = partial(conv2d_silu, grid=grid)
    expected = value_and_grads(run, {name: value.double() for name, value in values.items()})
    monkeypatch.setattr(cpu, "_reason", "not built")
    launched, forward = [], cuda.conv_forward
    monkeypatch.setattr(cuda, "conv_forward", lambda args: launched.append(1) or forward(args))
    actual = value_and_grads(run, values)
    assert bool(launched) == in_kernel
    for name, value in expected.items():
        torch.testing.assert_close(actual[name].double(), value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(2, 3, 37, 40, 4), (1, 2, 37, 5, 4)], ids=str)
def test_results_are_bitwise_equal_whatever_the_order_of_the_threads(shape):
    run = partial(value_and_grads, emulated, conv_inputs(*shape), reverse=(False, True)[: shape[0]])
    first, second = run(), run()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_slice_is_read_in_place(monkeypatch):
    x, weight, bias = conv_inputs(2, 2, 5, 8, 4).values()
    wide = torch.cat([x, x], -1)
    monkeypatch.setattr(torch.Tensor, "clone", None)
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda t: t if t.is_contiguous() else pytest.fail("copied"))
    assert emulated(wide[..., 8:], weight, bias, reverse=(False, True)).isfinite().all()


@pytest.mark.parametrize("offset", [8, 4, 2, 1])  # aligned to a vector, to that of backward, and to none
def test_slices_of_wider_tensors_give_what_their_copies_give(offset):
    values = conv_inputs(2, 2, 11, 8, 4)
    values["x"] = values["x"].bfloat16()
    wide = torch.full((4, 11, 24), float("nan"), dtype=torch.bfloat16)
    sliced = wide[::2, :, offset : offset + 8].copy_(values["x"])
    run = partial(emulated, reverse=(False, True))
    expected, actual = value_and_grads(run, values), value_and_grads(run, values | dict(x=sliced))
    assert all(torch.equal(actual[name], expected[name]) for name in ("y", "x"))
    for name in ("weight", "bias"):  # summed in another order where the slice is not aligned
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-5, atol=1e-5)


def test_cotangents_of_any_strides_are_read_right():
    values = conv_inputs(2, 2, 5, 8, 4)
    leaves = [value.requires_grad_() for value in values.values()]
    y = emulated(**values, reverse=(False, True))
    dy = torch.randn(2, 5, 2, 8).permute(2, 0, 1, 3)
    for given in (torch.ones(()).expand(y.shape), dy, torch.randn(8, 5, 2, 2).permute(3, 2, 1, 0)):
        actual = torch.autograd.grad(y, leaves, given, retain_graph=True)
        expected = torch.autograd.grad(y, leaves, given.contiguous(), retain_graph=True)
        for a, e in zip(actual, expected):
            torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5)


def test_bfloat16_gives_the_float32_result_of_the_same_inputs_rounded():
    values, results = conv_inputs(2, 1, 19, 8, 4), []
    x, dy = values["x"].bfloat16(), torch.randn(2, 1, 19, 8).bfloat16()
    for kind in (torch.bfloat16, torch.float32):
        leaves = [t.clone().requires_grad_() for t in (x.to(kind), values["weight"], values["bias"])]
        y = emulated(*leaves, reverse=(False, True))
        results.append([y, *torch.autograd.grad(y, leaves, dy.to(kind))])
    for half, full in zip(*results):
        assert torch.equal(half, full.to(half.dtype))


def test_a_nan_reaches_the_outputs_whose_taps_it_is_under_and_no_others():
    values = conv_inputs(2, 1, 12, 4, 4)
    values["x"][0, 5, 1] = torch.nan
    nan = emulated(**values, reverse=(False, True)).isnan()
    expected = torch.zeros_like(nan)
    expected[0, 0, 5:9, 1] = expected[1, 0, 2:6, 1] = True
    assert torch.equal(nan, expected)


def test_tokens_two_to_the_30_elements_apart_are_read_right(tmp_path):
    values, step = conv_inputs(2, 1, 3, 4, 4), 2**30 + 4
    values["x"] = values["x"].bfloat16()
    file = torch.from_file(str(tmp_path / "sparse"), shared=True, size=3 * step, dtype=torch.bfloat16)
    far = values | dict(x=file.as_strided((1, 3, 4), (0, step, 1)).copy_(values["x"]))
    run = partial(emulated, reverse=(False, True))
    expected, actual = value_and_grads(run, values), value_and_grads(run, far, keep_strides=True)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_the_operators_pass_opcheck():
    values = conv_inputs(2, 2, 5, 4, 4)
    leaves = [value.requires_grad_() for value in values.values()]
    torch.library.opcheck(torch.ops.vilonghorn.conv_silu.default, (*leaves, [0, 1], "cuda", [], True))
    given = (torch.ones(2, 2, 5, 4), *(leaf.detach() for leaf in leaves), [0, 1], "cuda", [], [1, 1, 1])
    torch.library.opcheck(torch.ops.vilonghorn.conv_silu_backward.default, given)


@pytest.mark.parametrize("shape", [(2, 0, 3, 4, 4), (1, 2, 0, 4, 4), (2, 1, 3, 0, 4)], ids=str)
def test_empty_tensors_give_empty_results_and_zero_gradients(shape):
    run = partial(emulated, reverse=(False, True)[: shape[0]])
    assert all((result == 0).all() for result in value_and_grads(run, conv_inputs(*shape)).values())


def test_backward_is_given_the_inputs_and_nothing_else():
    values, saved = conv_inputs(2, 1, 5, 4, 4), []
    leaves = [value.requires_grad_() for value in values.values()]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        emulated(**values, reverse=(False, True))
    assert {t.data_ptr() for t in saved} == {leaf.data_ptr() for leaf in leaves}


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


@pytest.mark.parametrize("K, reverse", [(3, (False,)), (5, (False, True)), (4, (True, True)), (4, (True, False, True))])
def test_what_the_kernel_does_not_take_runs_in_torch(K, reverse, monkeypatch):
    monkeypatch.setattr(cpu, "_reason", "not built")
    values = conv_inputs(len(reverse), 2, 9, 8, K)
    compare(conv_silu, values, 1e-6, truth=convolution, reverse=reverse)
    with pytest.raises(RuntimeError, match=rf"takes 4 taps in one direction .* not {K} and .*; use 'reference'"):
        emulated(**values, reverse=reverse)
    args = ConvArguments(*values.values(), [int(flag) for flag in reverse])
    with pytest.raises(RuntimeError, match="invalid argument"):  # from the library itself
        cuda.conv_forward(args)


def test_an_error_of_the_runtime_is_raised_with_its_text():
    with pytest.raises(RuntimeError, match="conv_silu: the CUDA kernel could not run: invalid argument"):
        emulated(**conv_inputs(1, 1, 3, 4, 4, torch.float64))
