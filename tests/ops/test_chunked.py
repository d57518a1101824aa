"""The scan in chunks against the equations in float64, at odd shapes, and the inverse that it rests on."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import oracle

from vilonghorn.ops.chunked import invert_unit_triangular, scan_chunked


def inputs(G, B, L, D, N, H, dtype=torch.float64):
    torch.manual_seed(L)
    tensors = [torch.randn(G, B, L, size) for size in (D, H, N, N)] + [torch.randn(G, D), torch.randn(G, H)]
    return [t.to(dtype).requires_grad_() for t in tensors]


def of_channels(tensor, D):
    """The numbers of a head for each of its channels."""
    return tensor.repeat_interleave(D // tensor.shape[-1], -1)


@given(
    reverse=st.lists(st.booleans(), min_size=1, max_size=3),
    batch=st.integers(1, 3),
    length=st.integers(1, 40),
    width=st.integers(1, 3),
    heads=st.integers(1, 3),
    d_state=st.sampled_from([1, 5, 16]),
    chunk=st.sampled_from([1, 4, 16, 64]),
)
def test_chunks_and_all_gradients_equal_the_equations(reverse, batch, length, width, heads, d_state, chunk):
    D = heads * width
    x, dt, k, q, skip, bias = tensors = inputs(len(reverse), batch, length, D, d_state, heads)
    y = scan_chunked(x, dt, k, q, D=skip, dt_bias=bias, reverse=reverse, chunk=chunk)
    given = dict(D=skip, dt_bias=of_channels(bias, D), rule="longhorn_exact", reverse=reverse)
    expected = oracle(x, of_channels(dt, D), k, q, **given)
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-11)
    weight = torch.randn_like(y)
    ours, theirs = (torch.autograd.grad((t * weight).sum(), tensors) for t in (y, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_short_types_are_close_and_keep_their_dtype(dtype, bound):
    x, dt, k, q, skip, bias = (t.detach() for t in inputs(2, 2, 197, 24, 16, 4, dtype))
    y = scan_chunked(x, dt, k, q, D=skip, dt_bias=bias, reverse=(False, True))
    given = dict(D=skip, dt_bias=of_channels(bias, 24), rule="longhorn_exact", reverse=(False, True))
    expected = oracle(x, of_channels(dt, 24), k, q, **given)
    assert y.dtype == dtype and (y.double() - expected).abs().max() < bound * expected.abs().max()


def test_keys_of_very_different_lengths_stay_accurate_in_float32():
    x, dt, k, q, *_ = (t.detach() for t in inputs(1, 2, 100, 24, 16, 4, torch.float32))
    k = k * 10 ** torch.empty(1, 2, 100, 1).uniform_(-3, 3, generator=torch.Generator().manual_seed(0))
    expected = oracle(x, of_channels(dt, 24), k, q, rule="longhorn_exact")
    assert (scan_chunked(x, dt, k, q).double() - expected).abs().max() < 1e-5 * expected.abs().max()


def test_the_inverse_is_that_of_linear_algebra():
    lower = torch.randn(5, 2, 32, 32, dtype=torch.float64).tril(-1) / 4
    expected = torch.linalg.inv(lower + torch.eye(32))
    torch.testing.assert_close(invert_unit_triangular(lower), expected, rtol=1e-9, atol=1e-9)


def test_heads_that_do_not_divide_the_channels_are_refused():
    x, dt, k, q, *_ = inputs(1, 1, 3, 8, 2, 4)
    with pytest.raises(ValueError, match="dt has 3 heads, expected a divisor of the 8 channels"):
        scan_chunked(x, dt[..., :3], k, q)
