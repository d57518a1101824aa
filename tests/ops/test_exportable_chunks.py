"""The scan in chunks against the equations in float64, at odd shapes, and the inverse that it rests on."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import heads_inputs, heads_oracle, value_and_grads

from vilonghorn.ops import scan
from vilonghorn.ops.arguments import ScanArguments
from vilonghorn.ops.exportable import CHUNK, invert_unit_triangular, scan_in_chunks


def scan_chunked(chunk=CHUNK, **values):
    return scan_in_chunks(ScanArguments(**values, rule="longhorn_exact"), chunk)


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
    values = heads_inputs(len(reverse), batch, length, heads * width, d_state, heads, dtype=torch.float64)
    expected = value_and_grads(heads_oracle, values, reverse=reverse)
    actual = value_and_grads(partial(scan_chunked, chunk=chunk), values, reverse=reverse)
    torch.testing.assert_close(actual["y"], expected["y"], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_short_types_are_close_and_keep_their_dtype(dtype, bound):
    values = heads_inputs(2, 2, 197, 24, 16, 4, dtype=dtype)
    y, expected = (f(**values, reverse=(False, True)) for f in (scan_chunked, heads_oracle))
    assert y.dtype == dtype and (y.double() - expected).abs().max() < bound * expected.abs().max()


def test_keys_of_very_different_lengths_stay_accurate_in_float32():
    values = heads_inputs(1, 2, 100, 24, 16, 4)
    values["k"] *= 10 ** torch.empty(1, 2, 100, 1).uniform_(-3, 3, generator=torch.Generator().manual_seed(0))
    y, expected = (f(**values) for f in (scan_chunked, heads_oracle))
    assert (y.double() - expected).abs().max() < 1e-5 * expected.abs().max()


def test_the_inverse_is_that_of_linear_algebra():
    lower = torch.randn(5, 2, 32, 32, dtype=torch.float64).tril(-1) / 4
    expected = torch.linalg.inv(lower + torch.eye(32))
    torch.testing.assert_close(invert_unit_triangular(lower), expected, rtol=1e-9, atol=1e-9)


def test_no_tokens_give_an_empty_result():
    values = heads_inputs(2, 1, 0, 8, 2, 4)
    assert scan_chunked(**values, reverse=(True, False)).shape == (2, 1, 0, 8)


def test_heads_that_do_not_fit_are_refused():
    values = heads_inputs(2, 1, 5, 8, 2, 4) | dict(dt=torch.ones(2, 1, 5, 3), dt_bias=None)
    with pytest.raises(ValueError, match="dt has 3 heads, expected a divisor of the 8 channels"):
        scan(**values, rule="longhorn_exact", reverse=(False, True))


@pytest.mark.parametrize("rule", ["longhorn", "longhorn_exact"])
def test_a_scan_token_by_token_repeats_the_steps_of_heads(rule):
    values = heads_inputs(2, 2, 19, 12, 4, 3)
    repeated = values | {name: values[name].repeat_interleave(4, -1) for name in ("dt", "dt_bias")}
    heads, channels = (value_and_grads(scan, v, rule=rule, reverse=(False, True)) for v in (values, repeated))
    assert torch.equal(heads["y"], channels["y"]) and torch.equal(heads["k"], channels["k"])
    torch.testing.assert_close(heads["dt"], channels["dt"].unflatten(-1, (3, 4)).sum(-1))
