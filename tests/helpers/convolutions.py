"""Tests of every GPU kernel of the convolution, for modules that run them by an emulator, an interpreter or a GPU.

Such a module imports the tests, and has a fixture `backend`, the name of the backend.
"""

import os
from functools import partial

import pytest
import torch
from oracle import compare, conv_inputs, convolution, value_and_grads

from vilonghorn.ops import conv_silu

# (G, B, L, D, K) and the reverse flags: pairs of directions and single ones, both kinds first, lengths below the taps
# and around the segments, channels that are not a multiple of a vector
CASES = [
    ((1, 1, 1, 1, 4), (False,)),
    ((2, 2, 3, 5, 4), (False, True)),
    ((2, 1, 2, 8, 4), (True, False)),
    ((2, 3, 33, 40, 4), (True, False)),
    ((1, 2, 21, 24, 4), (True,)),
    ((1, 1, 9, 12, 4), (False,)),
    ((2, 1, 19, 6, 4), (False, False)),
    ((3, 1, 17, 8, 4), (True, False, True)),
    ((3, 1, 17, 33, 3), (False, True, False)),
    ((1, 2, 9, 16, 1), (True,)),
    ((2, 1, 23, 6, 7), (False, True)),
]
# Relative errors: of rounding the result for the short types
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def check(backend: str | None, shape, reverse, dtype=torch.float32, device: str = "cpu") -> None:
    """Values and gradients agree with torch's convolution in float64."""
    run = partial(conv_silu, backend=backend)
    compare(run, conv_inputs(*shape, dtype), TOLERANCE[dtype], device, truth=convolution, reverse=reverse)


@pytest.fixture
def device() -> str:
    """Where the kernels run."""
    return "cpu"


@pytest.mark.parametrize("offset", [8, 4, 2, 1])  # aligned to a vector, to that of backward, and to none
def test_slices_of_wider_tensors_give_what_their_copies_give(offset, backend, device):
    values = {name: value.to(device) for name, value in conv_inputs(2, 2, 11, 8, 4).items()}
    values["x"] = values["x"].bfloat16()
    wide = torch.full((4, 11, 24), float("nan"), dtype=torch.bfloat16, device=device)
    sliced = wide[::2, :, offset : offset + 8].copy_(values["x"])
    run = partial(conv_silu, reverse=(False, True), backend=backend)
    expected, actual = value_and_grads(run, values), value_and_grads(run, values | dict(x=sliced))
    assert all(torch.equal(actual[name], expected[name]) for name in ("y", "x"))
    for name in ("weight", "bias"):  # summed in another order where the slice is not aligned
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-5, atol=1e-5)


def test_cotangents_of_any_strides_are_read_right(backend):
    values = conv_inputs(2, 2, 5, 8, 4)
    leaves = [value.requires_grad_() for value in values.values()]
    y = conv_silu(**values, reverse=(False, True), backend=backend)
    dy = torch.randn(2, 5, 2, 8).permute(2, 0, 1, 3)
    for given in (torch.ones(()).expand(y.shape), dy, torch.randn(8, 5, 2, 2).permute(3, 2, 1, 0)):
        actual = torch.autograd.grad(y, leaves, given, retain_graph=True)
        expected = torch.autograd.grad(y, leaves, given.contiguous(), retain_graph=True)
        for a, e in zip(actual, expected):
            torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5)


def test_bfloat16_gives_the_float32_result_of_the_same_inputs_rounded(backend):
    # The interpreter cuts float32 to bfloat16, where a GPU rounds: one unit in the last of 8 digits.
    tolerance = 2**-7 if "TRITON_INTERPRET" in os.environ else 0
    values, results = conv_inputs(2, 1, 19, 8, 4), []
    x, dy = values["x"].bfloat16(), torch.randn(2, 1, 19, 8).bfloat16()
    for kind in (torch.bfloat16, torch.float32):
        leaves = [t.clone().requires_grad_() for t in (x.to(kind), values["weight"], values["bias"])]
        y = conv_silu(*leaves, reverse=(False, True), backend=backend)
        results.append([y, *torch.autograd.grad(y, leaves, dy.to(kind))])
    for half, full in zip(*results):
        torch.testing.assert_close(half, full.to(half.dtype), rtol=tolerance, atol=0)


def test_a_nan_reaches_the_outputs_whose_taps_it_is_under_and_no_others(backend):
    values = conv_inputs(2, 1, 12, 4, 4)
    values["x"][0, 5, 1] = torch.nan
    nan = conv_silu(**values, reverse=(False, True), backend=backend).isnan()
    expected = torch.zeros_like(nan)
    expected[0, 0, 5:9, 1] = expected[1, 0, 2:6, 1] = True
    assert torch.equal(nan, expected)


def test_tokens_two_to_the_30_elements_apart_are_read_right(backend, tmp_path):
    values, step = conv_inputs(2, 1, 3, 4, 4), 2**30 + 4
    values["x"] = values["x"].bfloat16()
    file = torch.from_file(str(tmp_path / "sparse"), shared=True, size=3 * step, dtype=torch.bfloat16)
    far = values | dict(x=file.as_strided((1, 3, 4), (0, step, 1)).copy_(values["x"]))
    run = partial(conv_silu, reverse=(False, True), backend=backend)
    expected = value_and_grads(run, values)
    leaves = [value.requires_grad_() for value in far.values()]
    y = run(*leaves)
    cotangent = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    results = [y, *torch.autograd.grad(y, leaves, cotangent.to(y))]
    assert all(torch.equal(a.double(), e) for a, e in zip(results, expected.values()))


def test_the_operators_pass_opcheck(backend):
    values = conv_inputs(2, 2, 5, 4, 4)
    leaves = [value.requires_grad_() for value in values.values()]
    torch.library.opcheck(torch.ops.vilonghorn.conv_silu.default, (*leaves, [0, 1], backend, [], True))
    given = (torch.ones(2, 2, 5, 4), *(leaf.detach() for leaf in leaves), [0, 1], backend, [], [1, 1, 1])
    torch.library.opcheck(torch.ops.vilonghorn.conv_silu_backward.default, given)


@pytest.mark.parametrize("shape", [(2, 0, 3, 4, 4), (1, 2, 0, 4, 4), (2, 1, 3, 0, 4)], ids=str)
def test_empty_tensors_give_empty_results_and_zero_gradients(shape, backend):
    run = partial(conv_silu, reverse=(False, True)[: shape[0]], backend=backend)
    assert all((result == 0).all() for result in value_and_grads(run, conv_inputs(*shape)).values())


def test_backward_is_given_the_inputs_and_nothing_else(backend):
    values, saved = conv_inputs(2, 1, 5, 4, 4), []
    leaves = [value.requires_grad_() for value in values.values()]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        conv_silu(**values, reverse=(False, True), backend=backend)
    assert {t.data_ptr() for t in saved} == {leaf.data_ptr() for leaf in leaves}
