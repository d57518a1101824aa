"""`conv_silu`: the short depthwise convolution before the scan, for all directions at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from timm.layers import is_exportable
from torch import Tensor

from .backends import cpu as native
from .backends import cpu_mixer as native_mixer
from .register import differentiate, operator
from .validate import DTYPES, autocast_dtype, direction_flags

MAX_TAPS = 64


def conv_silu(x: Tensor, weight: Tensor, bias: Tensor, *, reverse: Sequence[bool] = (False,)) -> Tensor:
    """Depthwise causal convolution over time and SiLU, in (B, L, D), for each of G directions of one input.

    y[g, b, t] = silu(bias[g] + sum_j weight[g, :, j] x[b, t - (K - 1) + j]), with zeros before the first token; where
    reverse[g], the same over the tokens from last to first (anti-causal). Runs the native kernel on a CPU that has it,
    else plain torch, which inductor fuses.

    Args:
        x: tokens, (B, L, D), any strides.
        weight: taps, (G, D, K), the last one meeting the present token; K from 1 to 64 (4 is specialised).
        bias: (G, D).
        reverse: a flag for each direction.

    Returns:
        y, (G, B, L, D), of x's dtype (of the autocast dtype under autocast).

    Raises:
        ValueError: shapes or devices that do not fit.
        TypeError: a dtype outside float32, bfloat16, float16 and float64, or what is no flag.
    """
    flags = direction_flags("conv_silu", reverse)
    if x.dim() != 3 or weight.dim() != 3 or weight.shape[1] != x.shape[2] or bias.shape != weight.shape[:2]:
        raise ValueError(
            f"conv_silu: x {tuple(x.shape)}, weight {tuple(weight.shape)}, bias {tuple(bias.shape)}; "
            "expected (B, L, D), (G, D, K), (G, D)"
        )
    if len(reverse) != len(weight) or not 1 <= weight.shape[2] <= MAX_TAPS:
        raise ValueError(
            f"conv_silu: {len(reverse)} reverse flags and {weight.shape[2]} taps for weight {tuple(weight.shape)}; "
            f"expected a flag for each direction and 1 to {MAX_TAPS} taps"
        )
    if not x.device == weight.device == bias.device:
        raise ValueError(
            f"conv_silu: x is on {x.device}, weight on {weight.device}, bias on {bias.device}; move them to one"
        )
    if not {x.dtype, weight.dtype, bias.dtype} <= set(DTYPES):
        raise TypeError(f"conv_silu: {x.dtype}, {weight.dtype}, {bias.dtype}; expected {', '.join(map(str, DTYPES))}")
    dtype = autocast_dtype(x)
    if dtype is not None:
        x = x.to(dtype)
    if not is_exportable() and native.unavailable(x.device.type) is None:
        return _run(x, weight, bias, flags)
    return conv_silu_reference(x, weight, bias, reverse)


def conv_silu_reference(x: Tensor, weight: Tensor, bias: Tensor, reverse: Sequence[bool]) -> Tensor:
    """`conv_silu` in plain torch: shifted products, no transposes; in float32 at least, rounded once."""
    given, compute = x.dtype, torch.promote_types(x.dtype, torch.float32)
    x, weight, bias = x.to(compute), weight.to(compute), bias.to(compute)
    L, K = x.shape[1], weight.shape[2]
    before, after = F.pad(x, (0, 0, K - 1, 0)), F.pad(x, (0, 0, 0, K - 1))
    outputs = []
    for w, c, flag in zip(weight.unbind(0), bias.unbind(0), reverse):
        y = c
        for j in range(K):
            y = y + w[:, j] * (after[:, K - 1 - j :][:, :L] if flag else before[:, j : j + L])
        outputs.append(F.silu(y))
    return torch.stack(outputs).to(given)


@operator("conv_silu")
def _conv_silu(x: Tensor, weight: Tensor, bias: Tensor, reverse: Sequence[int]) -> Tensor:
    return native_mixer.conv_forward(x, weight, bias, tuple(map(bool, reverse)))


@torch.library.register_fake("vilonghorn::conv_silu")
def _(x, weight, bias, reverse):
    return x.new_empty((weight.shape[0], *x.shape))


@operator("conv_silu_backward")
def _conv_silu_backward(dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, reverse: Sequence[int]) -> list[Tensor]:
    return list(native_mixer.conv_backward(dy, x, weight, bias, tuple(map(bool, reverse))))


@torch.library.register_fake("vilonghorn::conv_silu_backward")
def _(dy, x, weight, bias, reverse):
    return [t.new_empty(t.shape) for t in (x, weight, bias)]


_run = differentiate(_conv_silu, _conv_silu_backward)
