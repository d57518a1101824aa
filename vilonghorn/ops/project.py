"""Linear projections of tokens, which on x86 processors oneDNN does faster than the BLAS behind torch's own.

Its products use all vector widths of AMD's processors too. Only float32 is taken from torch: its short types are oneDNN's
already.
"""

from __future__ import annotations

import platform

import torch
import torch.nn.functional as F
from timm.layers import is_exportable
from torch import Tensor
from torch.autograd.function import once_differentiable

from .arguments import autocast_dtype

X86 = platform.machine().lower() in ("x86_64", "amd64")


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x weight^T, without autograd.

    Args:
        x: (..., K), any strides.
        weight: (N, K), of x's dtype, any strides.

    Returns:
        (..., N).
    """
    if _is_for_onednn(x, weight):
        return torch.ops.mkldnn._linear_pointwise(x.contiguous(), weight, None, "none", [], "")
    return F.linear(x, weight)


def _is_for_onednn(x: Tensor, weight: Tensor) -> bool:
    return (
        X86
        and x.device.type == weight.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and x.numel() * weight.numel() > 0
        and torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
    )


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(x, weight):
        return product(x, weight)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dx = product(dy, weight.t()) if ctx.needs_input_grad[0] else None
        return dx, dy.flatten(0, -2).t() @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None


def project(x: Tensor, weight: Tensor) -> Tensor:
    """x weight^T, as `torch.nn.functional.linear`, which does it wherever somebody looks into the graph (compilers, export,
    traces) or autocast chooses the dtype.

    Args:
        x: (..., K).
        weight: (N, K).

    Returns:
        (..., N), of x's dtype (of the autocast dtype under autocast).
    """
    seen = torch.compiler.is_compiling() or torch.jit.is_tracing() or is_exportable()
    if seen or autocast_dtype(x) is not None or not _is_for_onednn(x, weight):
        return F.linear(x, weight)
    return _Project.apply(x, weight)
