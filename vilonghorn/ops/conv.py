"""`conv_silu`: the short depthwise convolution before the scan, for all directions at once; `conv2d_silu` on a grid."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._torch import autocast_dtype, num_dispatch_modes
from .arguments import ConvArguments
from .backends import CONV_BACKENDS, choose_conv, cuda, reference
from .register import register_op
from .scan_order import class_token_first, insert_class_token
from .validate import check_flags, check_grid, validate_conv


def conv_silu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    reverse: Sequence[bool] = (False,),
    initial_state: Tensor | None = None,
    return_state: bool = False,
    backend: str | None = None,
) -> Tensor | Any:
    """Depthwise causal convolution over the tokens, then SiLU, for each of G directions of one input.

    y[g, b, t] = silu(bias[g] + sum_j weight[g, :, j] x[b, t - (K - 1) + j]), with zeros before the first token. Where
    reverse[g], the same over the tokens from last to first (anti-causal). Backward computes the convolution again
    from x, so nothing else is kept. Runs a native kernel where there is one, else plain torch, which inductor fuses.

    Args:
        x: tokens, (B, L, D), any strides.
        weight: (G, D, K), the last of K for the present token; K from 1 to 64. The kernel of a GPU is for K = 4 and one
            direction or two opposite ones.
        bias: (G, D).
        reverse: a flag for each direction.
        initial_state: the K - 1 tokens before x, in a reverse direction after x, (B, K - 1, D). Default: zeros. It and
            the next one are for directions that read the same way.
        return_state: also return the K - 1 tokens before the piece that is read next (default: False).
        backend: "cpu" or "cuda" to insist on, or "reference" for plain torch; default: the first that can run on x's
            device.

    Returns:
        y, (G, B, L, D), of x's dtype (of the autocast dtype under autocast). With `return_state`, y and (B, K - 1, D).

    Raises:
        ValueError: shapes or devices that do not fit, a state of directions that differ, or an unknown backend.
        TypeError: a dtype outside float32, bfloat16, float16 and float64, or flags other than True and False.
        RuntimeError: the backend asked for cannot run here.
    """
    x = x.to(autocast_dtype(x) or x.dtype)
    args = ConvArguments(x, weight, bias, check_flags("conv_silu", reverse), backend)
    if initial_state is not None or return_state:
        return _conv_of_a_piece(args, initial_state, return_state)
    counted = x.is_meta and num_dispatch_modes()  # nothing runs there: a counter of FLOPs knows the operator
    if _choose(args) == reference.NAME and not counted:
        validate_conv(args)
        return conv_silu_reference(x, weight, bias, args.reverse)
    return _run(args)


def _conv_of_a_piece(args: ConvArguments, state: Tensor | None, return_state: bool) -> Tensor | Any:
    _, B, L, D, _, taps, *_ = validate_conv(args)
    x, weight, bias, flags, backend, _ = args
    if len(set(flags)) > 1:
        raise ValueError(f"conv_silu: reverse is {flags}, expected equal flags for a state: all read before x or after")
    before, is_reverse = taps - 1, bool(flags[0])
    state = x.new_zeros(B, before, D) if state is None else state.to(x.dtype)
    if state.shape != (B, before, D):
        raise ValueError(f"conv_silu: initial_state has shape {tuple(state.shape)}, expected {(B, before, D)}")
    joined = torch.cat([x, state] if is_reverse else [state, x], 1)
    y = conv_silu(joined, weight, bias, reverse=[is_reverse] * len(flags), backend=backend)
    y = y.narrow(2, 0 if is_reverse else before, L)
    return (y, joined.narrow(1, 0 if is_reverse else L, before)) if return_state else y


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


def conv2d_silu(x: Tensor, weight: Tensor, bias: Tensor, grid: Sequence[int]) -> Tensor:
    """Depthwise convolution over the grid of patches, then SiLU, with G filters a channel.

    Without a class token, one filter of 3 x 3 runs in the CUDA library where there is one, else torch computes.

    Source: Vision-LSTM v2 (Alkin et al., arXiv 2406.04303), which has no class token. Here a class token is an image of
    one pixel: the middle of the filter is its weight.

    Args:
        x: tokens in the order of the scan, (B, L, D): the patches of the grid, perhaps with a class token.
        weight: (G, D, height, width), odd.
        bias: (G, D).
        grid: rows and columns of patches.

    Returns:
        y, (G, B, L, D), of x's dtype (of the autocast dtype under autocast).

    Raises:
        ValueError: tokens that are not the patches of the grid and at most one more, or a filter of an even size.
    """
    *_, height, width = weight.shape
    conv_grid = [*grid, height, width]
    check_grid("conv2d_silu", x.shape[1], height * width, conv_grid)
    x, (rows, columns) = x.to(autocast_dtype(x) or x.dtype), grid
    args = ConvArguments(x, weight.flatten(2), bias, [0] * len(weight), conv_grid=conv_grid)
    if _choose(args) == cuda.NAME:
        return _run(args)
    weight, bias = weight.to(x.dtype), bias.to(x.dtype)
    class_token, patches = None, x
    if x.shape[1] > rows * columns:
        ordered = class_token_first(x)
        class_token, patches = ordered[:, :1], ordered[:, 1:]
    maps = patches.unflatten(1, (rows, columns)).permute(0, 3, 1, 2)  # channels_last: others are several times slower
    outputs = []
    for w, b in zip(weight.unbind(0), bias.unbind(0)):
        y = F.conv2d(maps, w[:, None], b, padding=(height // 2, width // 2), groups=w.shape[0])
        y = y.permute(0, 2, 3, 1).flatten(1, 2)
        if class_token is not None:
            y = insert_class_token(y, class_token * w[:, height // 2, width // 2] + b)
        outputs.append(F.silu(y))
    return torch.stack(outputs)


def _choose(args: ConvArguments) -> str:
    """The name of the backend of a convolution. Raises RuntimeError if the one asked for has no kernel for it."""
    name = choose_conv(args.x.device, args.x.dtype, args.backend)
    taps, length = args.weight.shape[-1], args.x.shape[1]
    if name != cuda.NAME or cuda.takes_conv(taps, args.reverse, args.conv_grid, length):
        return name
    if args.backend == cuda.NAME:
        expected = f"takes {cuda.TAPS} taps in one direction or in two opposite ones"
        raise RuntimeError(f"conv_silu: backend 'cuda' {expected}, not {taps} and {args.reverse}; use 'reference'")
    return reference.NAME


def _kernel(args: ConvArguments) -> Any:
    name = _choose(args)
    if name == reference.NAME:
        raise RuntimeError(
            f"conv_silu: no kernel runs {args.x.dtype} on {args.x.device.type!r}; call vilonghorn.ops.conv_silu, which "
            "falls back to torch"
        )
    return CONV_BACKENDS[name]


_run = register_op(
    "conv_silu",
    ConvArguments,
    validate_conv,
    num_saved=0,
    forward=lambda args, save: _kernel(args).conv_forward(args),
    fake=lambda args, save: args.x.new_empty((args.weight.shape[0], *args.x.shape)),
    backward=lambda dy, saved, args, wanted: _kernel(args).conv_backward(dy, args),
)
