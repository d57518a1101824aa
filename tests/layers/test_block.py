"""The residual block: its sums, their type, and stochastic depth."""

from functools import partial

import pytest
import torch
from torch import nn

from vilonghorn.layers import Block, widen

norm_layer = partial(nn.RMSNorm, eps=1e-5)


def test_blocks_in_sequence_equal_vims_add_then_norm():
    torch.manual_seed(0)
    blocks = [Block(32, norm_layer=norm_layer).double() for _ in range(3)]
    tokens = torch.randn(2, 7, 32, dtype=torch.float64)
    hidden, residual = tokens, None
    for block in blocks:
        residual = hidden if residual is None else residual + hidden
        normed = residual * torch.rsqrt(residual.square().mean(-1, keepdim=True) + 1e-5) * block.norm.weight
        hidden = block.mixer(normed)
    torch.testing.assert_close(nn.Sequential(*blocks)(tokens), residual + hidden)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_residual_stays_in_float32_or_wider_whatever_the_parameters(dtype):
    block = Block(32, dtype=dtype)
    stream = widen(torch.randn(2, 7, 32).to(dtype))
    assert stream.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert block(stream).dtype == stream.dtype


def test_drop_path_skips_the_branch_of_whole_samples_and_rescales_the_rest():
    torch.manual_seed(0)
    block = Block(32, drop_path=0.5)
    tokens = torch.randn(64, 3, 32)
    branch = block.eval()(tokens) - tokens
    scale = (block.train()(tokens) - tokens) / branch
    kept = scale[:, 0, 0] > 1
    assert 16 < kept.sum() < 48
    assert torch.allclose(scale[kept], torch.tensor(2.0), atol=1e-2)
    assert torch.equal(scale[~kept], torch.zeros_like(scale[~kept]))
