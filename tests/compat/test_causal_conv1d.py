"""The convolutions of `vilonghorn.compat` against sums in float64, values and gradients."""

import plain_mamba as plain
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vilonghorn.compat.causal_conv1d import causal_conv1d_fn, causal_conv1d_update, conv_bwd, conv_fwd


def inputs(batch=2, dim=5, length=7, taps=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = dict(x=(batch, dim, length), weight=(dim, taps), bias=(dim,), initial_states=(batch, dim, taps - 1))
    return {n: torch.randn(*shape, generator=generator) for n, shape in shapes.items()}


@settings(max_examples=20, deadline=None)
@given(
    length=st.integers(1, 12),
    taps=st.integers(1, 5),
    absent=st.sets(st.sampled_from(["bias", "initial_states"])),
    activation=st.sampled_from([None, "silu", "swish"]),
    returns=st.booleans(),
)
def test_values_and_gradients_of_every_form(length, taps, absent, activation, returns):
    def reference(x, weight, bias, initial_states):
        y = plain.causal_conv1d(x, weight, bias, initial_states, activation)
        before = x.new_zeros(2, 5, taps - 1) if initial_states is None else initial_states
        return (y, torch.cat([before, x], -1)[..., length:]) if returns else y

    def function(**tensors):
        return causal_conv1d_fn(**tensors, activation=activation, return_final_states=returns)

    plain.agree(function, reference, inputs(length=length, taps=taps) | dict.fromkeys(absent))


def test_the_activation_may_be_the_fourth_argument_and_the_states_have_a_place():
    x, weight, bias, states = inputs().values()
    assert torch.equal(causal_conv1d_fn(x, weight, bias, "silu"), causal_conv1d_fn(x, weight, bias, activation="silu"))
    out = torch.empty_like(states)
    _, final = causal_conv1d_fn(x, weight, bias, return_final_states=True, final_states_out=out)
    assert final is out and torch.equal(out, x[..., -3:])


@pytest.mark.parametrize("others, place", [((), ()), ((None,), ()), ((None,) * 3, (False,))])  # 1.0, 1.1 and 1.2
@pytest.mark.parametrize("has_silu", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_extension_of_each_version_has_the_values_and_gradients_of_sums(others, place, has_silu, has_bias):
    x, weight, bias, dout = *list(inputs(length=4).values())[:3], torch.randn(2, 5, 4)
    given = [t.double().requires_grad_() for t in (x, weight, bias)[: 2 + has_bias]]
    expected = plain.causal_conv1d(*given, activation="silu" if has_silu else None)
    bias, expected_grads = bias if has_bias else None, torch.autograd.grad(expected, given, dout.double())
    plain.close(conv_fwd(x, weight, bias, *others, has_silu), expected)
    halves = torch.zeros(2, 10, 4)
    grads = conv_bwd(x, weight, bias, dout, *others, halves[:, 5:], *place, has_silu)
    assert grads[0].data_ptr() == halves[:, 5:].data_ptr()  # the place that was given
    for grad, wanted in zip(grads, expected_grads):
        plain.close(grad, wanted)
    assert len(grads) == 3 + len(place) and (has_bias or grads[2] is None)
    assert conv_bwd(x, weight, bias, dout, *others, None, *place, has_silu)[0].equal(grads[0])


def test_the_extension_takes_states_forward_but_not_backward():
    x, weight, bias, states = inputs().values()
    final = torch.empty_like(states)
    assert conv_fwd(x, weight, bias, None, states, final, True).equal(
        causal_conv1d_fn(x, weight, bias, initial_states=states, activation="silu")
    )
    assert final.equal(x[..., -3:])
    with pytest.raises(NotImplementedError, match="causal_conv1d_bwd: expected seq_idx and states None"):
        conv_bwd(x, weight, bias, x, None, states, None, None, False, True)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_a_short_dtype_with_wide_weights_is_rounded_once(activation):
    x, weight, bias, _ = inputs().values()
    x = x.bfloat16()
    y = causal_conv1d_fn(x, weight, bias, activation=activation)
    assert y.dtype == torch.bfloat16
    plain.close(y, plain.causal_conv1d(x, weight, bias, activation=activation), 2**-8)


@pytest.mark.parametrize("length, size", [(1, 3), (1, 5), (3, 4), (6, 4)])
@pytest.mark.parametrize("is_ring", [False, True])
@pytest.mark.parametrize("rows", [None, [3, -1]])
def test_updates_continue_a_sequence(length, size, is_ring, rows):
    x, weight, bias, _ = inputs(length=4 * length).values()
    state = torch.zeros(4 if rows else 2, 5, size)
    outputs = []
    for at in range(0, 4 * length, length):
        options = dict(cache_seqlens=torch.tensor([at, at], dtype=torch.int32)) if is_ring else {}
        options |= dict(conv_state_indices=torch.tensor(rows)) if rows else {}
        outputs.append(causal_conv1d_update(x[..., at : at + length], state, weight, bias, "silu", **options))
    expected = plain.causal_conv1d(x, weight, bias, activation="silu")
    if rows:
        expected[1] = 0
        assert not state[:3].any()
    plain.close(torch.cat(outputs, -1), expected)
    kept = state[3 if rows else 0]
    if is_ring:  # token t is at t modulo the size
        kept = kept.roll(-(4 * length) % size, -1)
    seen = min(size, 4 * length)
    assert torch.equal(kept[..., size - seen :], x[0, :, -seen:])


def test_one_token_has_no_dimension_of_tokens():
    x, weight, bias, _ = inputs().values()
    state = x[..., :3].clone()
    y = causal_conv1d_update(x[..., 3], state, weight, bias)
    plain.close(y, plain.causal_conv1d(x, weight, bias)[..., 3])


@pytest.mark.parametrize(
    "change, error, words",
    [
        (dict(x=torch.zeros(2, 5)), ValueError, r"x has shape \(2, 5\)"),
        (dict(weight=torch.zeros(4, 4)), ValueError, r"weight has shape \(4, 4\), expected \(5, 4\)"),
        (dict(bias=torch.zeros(4)), ValueError, r"bias has shape"),
        (dict(initial_states=torch.zeros(2, 5, 4)), ValueError, r"initial_states has shape"),
        (dict(activation="gelu"), NotImplementedError, "activation is 'gelu'"),
        (dict(seq_idx=torch.zeros(2, 7)), NotImplementedError, "packed sequences"),
    ],
)
def test_what_does_not_fit_has_a_sentence_with_its_name(change, error, words):
    with pytest.raises(error, match=f"causal_conv1d_fn: .*{words}"):
        causal_conv1d_fn(**inputs() | change)


def test_a_state_of_too_few_tokens_has_a_sentence():
    x, weight, *_ = inputs().values()
    with pytest.raises(ValueError, match="conv_state has 2 tokens, expected the 3 before a token"):
        causal_conv1d_update(x, torch.zeros(2, 5, 2), weight)
