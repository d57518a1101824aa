"""Linear layers under autocast: their weights are converted at once, and the gradients need no conversion."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from ..ops._torch import autocast_dtype, is_tracing, is_unchanged
from ..ops.backends import cpu

CLASSES = (nn.Parameter, Tensor, FakeTensor)  # of weights; other subclasses of tensors may store something else


class ShortLinear(torch.autograd.Function):
    """x short^T, plus a residual stream of the dtype of x if one is given. `short` is `weight` in the dtype of x.

    On an NVIDIA GPU the product adds the stream, from torch 2.14 on without a copy of it, and that of backward writes
    the gradient of `weight` in float32.
    """

    @staticmethod
    def forward(x: Tensor, short: Tensor, weight: Tensor, stream: Tensor | None) -> Tensor:  # noqa: D102
        rows = x.flatten(0, -2)
        y = rows @ short.T if stream is None else torch.addmm(stream.flatten(0, -2), rows, short.T)
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:  # noqa: D102
        x, short, weight, _ = inputs
        ctx.save_for_backward(x, short)
        ctx.dtype = weight.dtype

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]  # noqa: D102
        x, short = ctx.saved_tensors
        needs_x, _, needs_weight, needs_stream = ctx.needs_input_grad
        dweight = product(dy.flatten(0, -2).T, x.flatten(0, -2), ctx.dtype) if needs_weight else None
        return dy @ short if needs_x else None, None, dweight, dy if needs_stream else None


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrix product of a and b in `dtype`, rounded to their own dtype before where cuBLAS does not run it."""
    if dtype == torch.float32 and a.dtype != dtype and runs_cublas(a):
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)


def runs_cublas(t: Tensor) -> bool:
    """Whether products of t are cuBLAS's, which write float32 for shorter factors."""
    return t.is_cuda and torch.version.hip is None


def short_weights(x: Tensor, layers: Sequence[Any], others: Sequence[Tensor] = ()) -> list[Tensor] | None:
    """The weights of linear layers, without gradients, and other weights in the dtype that autocast gives x.

    None where autocast converts nothing, as on a CPU with the native library, or where the layers have to be called.
    """
    is_seen = is_tracing(x) and (not torch.compiler.is_compiling() or torch.compiler.is_exporting())
    dtype = None if is_seen else autocast_dtype(x)
    if dtype is None or cpu.unavailable(x.device.type) is None:
        return None
    if not all(is_unchanged(layer, nn.Linear) and layer.bias is None for layer in layers):
        return None
    given = [*(layer.weight for layer in layers), *others]
    if given[0].dtype == dtype or not all(type(weight) in CLASSES for weight in given):
        return None
    weights = [*(layer.weight.detach() for layer in layers), *others]
    parts = torch.cat([weight.flatten() for weight in weights]).to(dtype).split([weight.numel() for weight in weights])
    return [part.view(weight.shape) for part, weight in zip(parts, weights)]
