"""`conv_silu`: the short depthwise convolution before the scan, for all directions at once."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from timm.layers import is_exportable
from torch import Tensor

from .backends import cpu
from .register import register_op
from .validate import ConvArguments, autocast_dtype, check_flags, validate_conv


def conv_silu(x: Tensor, weight: Tensor, bias: Tensor, *, reverse: Sequence[bool] = (False,)) -> Tensor:
    """Depthwise causal convolution over the tokens, then SiLU, for each of G directions of one input.

    y[g, b, t] = silu(bias[g] + sum_j weight[g, :, j] x[b, t - (K - 1) + j]), with zeros before the first token. Where
    reverse[g], the same over the tokens from last to first (anti-causal). Runs the native kernel on a CPU that has it,
    else plain torch, which inductor fuses.

    Args:
        x: tokens, (B, L, D), any strides.
        weight: (G, D, K), the last of K for the present token; K from 1 to 64 (4 is specialised).
        bias: (G, D).
        reverse: a flag for each direction.

    Returns:
        y, (G, B, L, D), of x's dtype (of the autocast dtype under autocast).

    Raises:
        ValueError: shapes or devices that do not fit.
        TypeError: a dtype outside float32, bfloat16, float16 and float64, or flags other than True and False.
    """
    args = ConvArguments(x, weight, bias, check_flags("conv_silu", reverse))
    args = args._replace(x=x.to(autocast_dtype(x) or x.dtype))
    if is_exportable() or cpu.unavailable(x.device.type) is not None:
        validate_conv(args)
        return conv_silu_reference(*args)
    return _run(args)


def conv_silu_reference(x: Tensor, weight: Tensor, bias: Tensor, reverse: Sequence[int]) -> Tensor:
    """`conv_silu` in plain torch: shifted products without transposes, in float32 or wider, rounded once."""
    dtype, compute = x.dtype, torch.promote_types(x.dtype, torch.float32)
    x, weight, bias = x.to(compute), weight.to(compute), bias.to(compute)
    L, K = x.shape[1], weight.shape[2]
    before, after = F.pad(x, (0, 0, K - 1, 0)), F.pad(x, (0, 0, 0, K - 1))
    outputs = []
    for w, y, flag in zip(weight.unbind(0), bias.unbind(0), reverse):
        for j in range(K):
            y = y + w[:, j] * (after[:, K - 1 - j :][:, :L] if flag else before[:, j : j + L])
        outputs.append(F.silu(y))
    return torch.stack(outputs).to(dtype)


_run = register_op(
    "conv_silu",
    ConvArguments,
    validate_conv,
    num_saved=0,
    forward=lambda args, save: cpu.conv_forward(*args),
    fake=lambda args, save: args.x.new_empty((args.weight.shape[0], *args.x.shape)),
    backward=lambda dy, saved, args, wanted: cpu.conv_backward(dy, *args),
)
