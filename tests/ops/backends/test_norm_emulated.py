"""The backward of the norm on a GPU without a GPU: its kernel, compiled for the emulator in `kernels/`."""

import oracle
import pytest
import torch
from oracle import error

from vilonghorn.layers import Block
from vilonghorn.layers.norm import RMSNorm, residual_norm
from vilonghorn.ops.backends import cpu, cuda

pytestmark = pytest.mark.usefixtures("emulator")
DTYPES = (torch.float32, torch.bfloat16)
# Channels of half a warp and of a warp, once and several times; rows of one turn of a block and of many
SHAPES = [(1, 4), (37, 48), (2, 5, 64), (70, 192), (9, 260), (3, 1024), (1100, 68)]


def tensors(shape, dtype=torch.float32):
    """x, the gradients of x and of its norm, and the weight."""
    generator = torch.Generator().manual_seed(0)
    x, dx, dy = (torch.randn(shape, generator=generator).to(dtype) for _ in range(3))
    return 3 * x, dx, dy, torch.randn(shape[-1:], generator=generator)


@pytest.mark.parametrize("short", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_gradients_agree_with_float64_and_repeat_bit_for_bit(shape, dtype, short):
    x, dx, dy, weight = tensors(shape, dtype)
    dy = dy.to(short)
    exact = [t.double().requires_grad_() for t in (x, weight)]
    y = oracle.rms_norm(*exact, 1e-5)
    expected = torch.autograd.grad([exact[0], y], exact, [dx.double(), dy.double()])
    first, again = (cuda.norm_backward(dy, dx, x, weight, 1e-5) for _ in range(2))
    assert all(map(torch.equal, first, again)) and first[0].dtype == dtype
    errors = [error(found, true) for found, true in zip(first, expected)]
    assert errors[0] < (1e-6 if dtype == torch.float32 else 4e-3) and errors[1] < 1e-6


def test_gradients_of_any_strides_and_alignment_are_read_right():
    x, dx, dy, weight = tensors((6, 40))
    expected = cuda.norm_backward(dy, dx, x, weight, 1e-5)
    unaligned = torch.cat([dy.new_zeros(1), dy.flatten()])[1:].view(6, 40)
    for given in (torch.stack([dy, dx], -1).unbind(-1), (unaligned, dx)):
        assert all(map(torch.equal, cuda.norm_backward(*given, x, weight, 1e-5), expected))


def test_the_operator_passes_torchs_checks():
    x, dx, dy, weight = tensors((6, 40))
    torch.library.opcheck(torch.ops.vilonghorn.residual_norm_backward.default, (dy, dx, x, weight, 1e-5))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_block_trains_as_without_the_kernel(compiled, monkeypatch):
    block, x = Block(24, rule=None, d_conv=(3, 3), reverse=(False,), mlp_ratio=1.0), torch.randn(2, 20, 24)
    for weight in (block.norm.weight, block.norm2.weight):
        weight.data.normal_()
    torch._dynamo.reset()
    results, network = [], torch.compile(block, fullgraph=True, backend="aot_eager") if compiled else block
    for run in (block, network):
        leaf = x.clone().requires_grad_()
        y = run(leaf, [4, 5])
        results.append([y, *torch.autograd.grad(y.square().sum(), [leaf, *block.parameters()])])
        monkeypatch.setattr(cpu, "_reason", "not built")
    for expected, found in zip(*results):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_the_kernel_is_for_the_norm_as_it_was_made_and_what_it_takes(monkeypatch):
    monkeypatch.setattr(cpu, "_reason", "not built")

    def runs(channels=8, autocast=None, dtype=torch.float32, hook=False, grad=True):
        norm = RMSNorm(channels)
        if hook:
            norm.register_forward_hook(lambda *_: None)
        x = torch.ones(3, channels, dtype=dtype, requires_grad=True)
        with torch.set_grad_enabled(grad), torch.autocast("cpu", autocast, enabled=autocast is not None):
            stream, normed = residual_norm(norm, x)
        assert stream.data_ptr() == x.data_ptr() and normed.dtype == (autocast or torch.float32)
        return normed.grad_fn is not None and normed.grad_fn.name() == "ResidualNormBackward"

    assert runs() and runs(autocast=torch.bfloat16) and runs(dtype=torch.bfloat16, autocast=torch.bfloat16)
    monkeypatch.setattr(cuda, "unavailable", lambda device, dtype=None: None if dtype in cuda.DTYPES else "no kernel")
    for options in (dict(channels=6), dict(channels=1028), dict(hook=True), dict(grad=False)):
        assert not runs(**options)
    norm = RMSNorm(8)
    with torch.autocast("cpu", torch.float16):
        assert residual_norm(norm, torch.ones(3, 8))[1].grad_fn.name() != "ResidualNormBackward"
