"""Linear projections of tokens, with autograd, by `products`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from timm.layers import is_exportable
from torch import Tensor
from torch._C import _are_functorch_transforms_active as functorch_is_active
from torch.autograd.function import once_differentiable

from .products import is_for_tiles, matmul, tiled
from .transforms import each, is_batched
from .validate import autocast_dtype


class _Project(torch.autograd.Function):
    """Of what is for tiles."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return tiled(matmul, x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        args = (dy, *ctx.saved_tensors)
        if not is_batched():
            return tuple(_gradients(*args, *ctx.needs_input_grad))
        return tuple(grad if needed else None for grad, needed in zip(each(_gradients, args), ctx.needs_input_grad))


def _gradients(dy: Tensor, x: Tensor, weight: Tensor, of_x: bool = True, of_weight: bool = True) -> list[Tensor | None]:
    dx = tiled(matmul, dy, weight.t()) if of_x else None
    return [dx, matmul(dy.flatten(0, -2).t(), x.flatten(0, -2)) if of_weight else None]


def project(x: Tensor, weight: Tensor) -> Tensor:
    """x weight^T, as `torch.nn.functional.linear`, which does it wherever somebody looks into the graph (compilers, export,
    traces, `torch.func`) or autocast chooses the dtype.

    Args:
        x: (..., K).
        weight: (N, K).

    Returns:
        (..., N), of x's dtype (of the autocast dtype under autocast).
    """
    return _Project.apply(x, weight) if _is_ours(x, weight) else F.linear(x, weight)


def is_watched() -> bool:
    """Whether somebody looks into the graph, who knows torch's own operators: a compiler, an export, a trace, a transform."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or is_exportable() or functorch_is_active()


def _is_ours(x: Tensor, weight: Tensor) -> bool:
    """Whether the tiles may do it: where nobody looks into the graph, and no autocast chooses the dtype."""
    return not is_watched() and autocast_dtype(x) is None and is_for_tiles(x, weight)
