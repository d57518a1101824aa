"""Linear projections of tokens, with autograd, by `products`; and those of normed tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from timm.layers import is_exportable
from torch import Tensor
from torch._C import _are_functorch_transforms_active as functorch_is_active
from torch.autograd.function import once_differentiable

from .arguments import autocast_dtype
from .norm import rms_norm, run_norm, run_norm_backward
from .products import is_for_tiles, matmul, tiled


class _Project(torch.autograd.Function):
    """Of what is for tiles."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return tiled(matmul, x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dx = tiled(matmul, dy, weight.t()) if ctx.needs_input_grad[0] else None
        return dx, matmul(dy.flatten(0, -2).t(), x.flatten(0, -2)) if ctx.needs_input_grad[1] else None


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


class _ProjectNormed(torch.autograd.Function):
    """Of what is for tiles. The normed tokens are made again in backward."""

    @staticmethod
    def forward(ctx, x, norm_weight, eps, weight):
        normed, scale = run_norm(x, norm_weight, eps)
        ctx.save_for_backward(x, norm_weight, scale, weight)
        ctx.eps = eps
        return tiled(matmul, normed, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, norm_weight, scale, weight = ctx.saved_tensors
        dx = dnorm_weight = dweight = None
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            dx, dnorm_weight = run_norm_backward(tiled(matmul, dy, weight.t()), scale, x, norm_weight)
        if ctx.needs_input_grad[3]:
            normed, _ = run_norm(x, norm_weight, ctx.eps)
            dweight = matmul(dy.flatten(0, -2).t(), normed.flatten(0, -2))
        return dx, dnorm_weight, None, dweight


def project_normed(x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor) -> Tensor:
    """`project`(`rms_norm`(x, norm_weight, eps), weight), which does not keep the normed tokens for backward.

    Args:
        x: (..., K).
        norm_weight: (K,).
        eps: added to the mean square.
        weight: (N, K).

    Returns:
        (..., N), as `project`.

    Raises:
        ValueError, TypeError: as `rms_norm`.
    """
    if _is_ours(x, weight) and norm_weight.shape == x.shape[-1:] and norm_weight.dtype == x.dtype:
        return _ProjectNormed.apply(x, norm_weight, eps, weight)
    return project(rms_norm(x, norm_weight, eps), weight)


def _is_ours(x: Tensor, weight: Tensor) -> bool:
    """Whether the tiles may do it: where nobody looks into the graph, and no autocast chooses the dtype."""
    seen = torch.compiler.is_compiling() or torch.jit.is_tracing() or is_exportable() or functorch_is_active()
    return not seen and autocast_dtype(x) is None and is_for_tiles(x, weight)
