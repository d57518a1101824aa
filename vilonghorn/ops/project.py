"""Linear projections of tokens, which on x86 processors the tiles of `kernels/matmul_cpu.cpp` do faster than the BLAS behind
torch's own. Only float32 is taken from torch."""

from __future__ import annotations

import platform
from collections.abc import Callable

import torch
import torch.nn.functional as F
from timm.layers import is_exportable
from torch import Tensor
from torch._C import _are_functorch_transforms_active as functorch_is_active
from torch.autograd.function import once_differentiable

from . import native
from .arguments import autocast_dtype

X86 = platform.machine().lower() in ("x86_64", "amd64")


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x weight^T, for kernels: without autograd, and out of sight of torch's tools.

    Args:
        x: (..., K), any strides.
        weight: (N, K), of x's dtype, any strides.

    Returns:
        (..., N).
    """
    return _tiled(_multiply, x, weight) if _is_for_tiles(x, weight) else F.linear(x, weight)


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """The gradient (N, K) of `product`'s weight, from that of its result (..., N) and x (..., K)."""
    dy, x = dy.flatten(0, -2).t(), x.flatten(0, -2)
    return _multiply(dy, x) if _is_for_tiles(dy, x.t()) else dy @ x


def _is_for_tiles(x: Tensor, weight: Tensor) -> bool:
    return (
        X86
        and native.library is not None
        and x.device.type == weight.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and x.dim() > 1
        and weight.dim() == 2
        and x.shape[-1] == weight.shape[-1]
        and x.numel() * weight.numel() > 0
    )


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    return native.matmul(a if 1 in a.stride() else a.contiguous(), b if 1 in b.stride() else b.contiguous())


torch.library.define("vilonghorn::matmul", "(Tensor a, Tensor b) -> Tensor")  # the same, where torch's tools see it
torch.library.impl("vilonghorn::matmul", "CPU")(_multiply)


@torch.library.register_fake("vilonghorn::matmul")
def _(a, b):
    return a.new_empty(a.shape[0], b.shape[1])


_matmul = torch.ops.vilonghorn.matmul.default


def _tiled(multiply: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor) -> Tensor:
    return multiply(x.flatten(0, -2), weight.t()).view(*x.shape[:-1], weight.shape[0])


class _Project(torch.autograd.Function):
    """Of what is for tiles."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return _tiled(_matmul, x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dx = _tiled(_matmul, dy, weight.t()) if ctx.needs_input_grad[0] else None
        return dx, _matmul(dy.flatten(0, -2).t(), x.flatten(0, -2)) if ctx.needs_input_grad[1] else None


def project(x: Tensor, weight: Tensor) -> Tensor:
    """x weight^T, as `torch.nn.functional.linear`, which does it wherever somebody looks into the graph (compilers, export,
    traces, `torch.func`) or autocast chooses the dtype.

    Args:
        x: (..., K).
        weight: (N, K).

    Returns:
        (..., N), of x's dtype (of the autocast dtype under autocast).
    """
    seen = torch.compiler.is_compiling() or torch.jit.is_tracing() or is_exportable() or functorch_is_active()
    if seen or autocast_dtype(x) is not None or not _is_for_tiles(x, weight):
        return F.linear(x, weight)
    return _Project.apply(x, weight)
