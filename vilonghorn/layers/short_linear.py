"""Linear layers under autocast: their weights are converted at once, and the gradients need no conversion."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad

from ..ops._torch import autocast_dtype, functorch_transform, has_global_hooks, is_tracing, is_unchanged
from ..ops.backends import cpu

CLASSES = (nn.Parameter, Tensor, FakeTensor)  # of weights; other subclasses of tensors may store something else


class ShortLinear(torch.autograd.Function):
    """`short_linear`. Its result is no view: it can be changed in place, and torch.compile returns it as it is."""

    @staticmethod
    def forward(x: Tensor, short: Tensor, weight: Tensor, stream: Tensor | None) -> Tensor:  # noqa: D102
        rows = x.flatten(0, -2)
        y = rows @ short.T if stream is None else torch.addmm(stream.flatten(0, -2), rows, short.T)
        return torch.ops.aten._unsafe_view(y, [*x.shape[:-1], short.shape[0]])

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:  # noqa: D102
        x, short, ctx.weight, _ = inputs  # saved, the weight could not be changed before backward
        ctx.save_for_backward(x, short)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]  # noqa: D102
        (x, short), weight = ctx.saved_tensors, ctx.weight
        needs_x, _, needs_weight, needs_stream = ctx.needs_input_grad
        if again := torch.is_grad_enabled() and not torch.compiler.is_compiling():  # gradients to differentiate again
            short = weight.to(dy.dtype)
        dx = dy @ short if needs_x else None
        factors = dy.flatten(0, -2).T, x.flatten(0, -2)
        dweight = None
        if needs_weight:  # mm with another dtype has no derivative
            dweight = torch.mm(*factors).to(weight.dtype) if again else product(*factors, weight.dtype)
        return dx, None, dweight, dy if needs_stream else None


def short_linear(x: Tensor, short: Tensor, weight: Tensor, stream: Tensor | None = None) -> Tensor:
    """x short^T, plus a residual stream of the dtype of x if one is given. `short` is `weight` in the dtype of x.

    On an NVIDIA GPU the product adds the stream, from torch 2.14 on without a copy of it, and that of backward writes
    the gradient of `weight` in float32.
    """
    return ShortLinear.apply(x, short, weight, stream)


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrix product of a and b in `dtype`, rounded to their own dtype before where cuBLAS does not run it."""
    if dtype == torch.float32 and a.dtype != dtype and runs_cublas(a):
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)


def runs_cublas(t: Tensor) -> bool:
    """Whether products of t are cuBLAS's, which write float32 for shorter factors."""
    return t.is_cuda and torch.version.hip is None


def short_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast gives x, or None where the layers have to be called.

    These are a CPU with the native library, tracing, export, transforms of torch.func, forward-mode derivatives and
    hooks on all modules.
    """
    if torch.compiler.is_compiling():
        is_seen = torch.compiler.is_exporting()
    else:
        is_seen = is_tracing(x) or functorch_transform() is not None or forward_ad._current_level >= 0
    if is_seen or has_global_hooks():
        return None
    return None if cpu.unavailable(x.device.type) is None else autocast_dtype(x)


def short_weights(x: Tensor, layers: Sequence[Any], others: Sequence[Tensor] = ()) -> list[Tensor] | None:
    """The weights of linear layers, without gradients, and other weights, all of `short_dtype`.

    None where that is None, where nothing is converted, or where one of the layers has to be called.
    """
    dtype = short_dtype(x)
    if dtype is None or not all(is_unchanged(layer, nn.Linear) and layer.bias is None for layer in layers):
        return None
    given = [*(layer.weight for layer in layers), *others]
    if given[0].dtype == dtype or not all(type(weight) in CLASSES for weight in given):
        return None
    weights = [*(layer.weight.detach() for layer in layers), *others]
    parts = torch.cat([weight.flatten() for weight in weights]).to(dtype).split([weight.numel() for weight in weights])
    return [part.view(weight.shape) for part, weight in zip(parts, weights)]
