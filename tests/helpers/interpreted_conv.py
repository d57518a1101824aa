"""What `test_triton.py` runs with TRITON_INTERPRET=1 for the convolution."""

from functools import partial

import pytest
import torch
from convolutions import *  # noqa: F403
from convolutions import CASES, hold
from interpreter import poisoned_memory  # noqa: F401
from oracle import conv_inputs, value_and_grads

from vilonghorn.ops import conv_silu


@pytest.fixture
def backend() -> str:
    return "triton"


@pytest.mark.parametrize("shape, reverse", [*CASES, ((2, 1, 12, 3, 9), (False, True))], ids=str)
def test_the_kernels_agree_with_the_oracle(shape, reverse):
    hold("triton", shape, reverse)


def test_a_repetition_is_bitwise_equal():
    run = partial(value_and_grads, partial(conv_silu, backend="triton"), conv_inputs(2, 3, 9, 5, 4), reverse=(0, 1))
    first, again = run(), run()
    assert all(torch.equal(first[name], again[name]) for name in first)
