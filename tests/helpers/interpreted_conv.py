"""What `test_triton_conv.py` runs in a process of its own, with TRITON_INTERPRET=1."""

from functools import partial

import convolutions
import pytest
import torch
from oracle import conv_inputs, value_and_grads

from vilonghorn.ops import conv_silu

interpreted = partial(conv_silu, backend="triton")


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """New tensors hold NaN, which shows in a result wherever a kernel did not write."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **options: empty(*args, **options).fill_(float("nan")))


@pytest.mark.parametrize("shape, reverse", [*convolutions.CASES, ((2, 1, 12, 3, 9), (False, True))], ids=str)
def test_the_kernels_agree_with_the_oracle(shape, reverse):
    convolutions.hold("triton", shape, reverse)


# The interpreter cuts float32 to bfloat16, where a GPU rounds: one unit in the last of 8 digits.
@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 2**-7), (torch.float16, 0)], ids=str)
def test_half_precision_rounds_inputs_and_results_once(dtype, tolerance):
    convolutions.hold_half("triton", dtype, tolerance)


@pytest.mark.parametrize("shape", [(2, 0, 3, 4, 4), (1, 2, 0, 4, 4), (2, 1, 3, 0, 4)], ids=str)
def test_empty_tensors_give_empty_results_and_zero_gradients(shape):
    results = value_and_grads(interpreted, conv_inputs(*shape), reverse=(False, True)[: shape[0]])
    assert all((result == 0).all() for result in results.values())


def test_a_repetition_is_bitwise_equal():
    run = partial(value_and_grads, interpreted, conv_inputs(2, 3, 9, 5, 4), reverse=(False, True))
    first, again = run(), run()
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_slices_of_wider_tensors_give_what_their_copies_give():
    convolutions.hold_slices("triton", 3)


def test_cotangents_of_any_strides_are_read_right():
    convolutions.hold_cotangents("triton")


def test_a_nan_reaches_the_outputs_whose_taps_it_is_under():
    convolutions.hold_nan("triton")


def test_tokens_two_to_the_30_elements_apart_are_read_right(tmp_path):
    convolutions.hold_far_tokens("triton", str(tmp_path / "sparse"))


def test_the_operators_pass_opcheck():
    convolutions.hold_opcheck("triton")


def test_backward_is_given_the_inputs_and_nothing_else():
    convolutions.hold_memory("triton")
