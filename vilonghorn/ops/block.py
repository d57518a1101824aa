"""`block`: a residual block as one operator on the CPU.

Its parts are `rms_norm`, `project` and `mix`, of which it is composed wherever the native library cannot run all of it at
once. Between any two of them Python would take its time, several times more in caches that a kernel has just filled than in
an idle loop; and neither the normed tokens nor the branch need memory of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor

from .backends import cpu_block as native_block
from .conv import MAX_TAPS
from .linear import is_watched, project
from .mamba_inner import mix
from .norm import rms_norm
from .products import has_tiles
from .register import differentiate, operator
from .validate import MAX_STATE, RULES, BlockArguments, autocast_dtype, direction_flags, saves


def block(
    x: Tensor,
    norm_weight: Tensor,
    in_proj: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor,
    x_proj: Tensor,
    dt_proj: Tensor,
    dt_bias: Tensor,
    A: Tensor | None,
    D: Tensor,
    out_proj: Tensor,
    *,
    rule: str = "longhorn",
    reverse: Sequence[bool] = (False, True),
    eps: float = 1e-5,
    residual: bool = True,
) -> Tensor:
    """x + branch, or the branch alone: `mix`(`project`(`rms_norm`(x, norm_weight, eps), in_proj), ..., out_proj).

    Args:
        x: tokens, (B, L, dim).
        norm_weight: (dim,).
        in_proj: (2D, dim).
        conv_weight, conv_bias, x_proj, dt_proj, dt_bias, A, D: as in `mix`.
        out_proj: (dim, D).
        rule: as in `mix`.
        reverse: as in `mix`.
        eps: added to the mean square.
        residual: whether x is added.

    Returns:
        (B, L, dim), of x's dtype; under autocast, the branch alone is of the autocast dtype.

    Raises:
        ValueError, TypeError: as the parts.
    """
    flags = direction_flags("block", reverse)
    weights = (conv_weight, conv_bias, x_proj, dt_proj, dt_bias, A, D, out_proj)
    args = BlockArguments(x, norm_weight, in_proj, *weights, rule, flags, float(eps), residual)
    if _runs_at_once(args):
        return _block_run(*args, saves(args[:11]))[0]
    branch = mix(project(rms_norm(x, norm_weight, eps), in_proj), *weights, rule=rule, reverse=reverse)
    if not residual:
        return branch
    if branch.shape != x.shape:
        raise ValueError(
            f"block: out_proj has shape {tuple(out_proj.shape)}, expected {x.shape[-1]} rows to go with x {tuple(x.shape)}"
        )
    return x + branch


def _runs_at_once(args: BlockArguments) -> bool:
    """Whether the native block may run. If not, the parts know what is wrong, or do it otherwise."""
    return has_tiles() and not is_watched() and autocast_dtype(args.x) is None and _fits(args)


def _fits(args: BlockArguments) -> bool:
    """Whether the arguments are as the native block takes them."""
    x, A = args.x, args.A
    if x.dim() != 3 or x.numel() == 0:
        return False
    if not all(t is None or (t.dtype == torch.float32 and t.is_cpu) for t in args[:11]):
        return False
    if not (args.conv_weight.dim() == args.x_proj.dim() == args.dt_proj.dim() == 3):
        return False
    dim, (G, D, K), P, R = x.shape[-1], args.conv_weight.shape, args.x_proj.shape[1], args.dt_proj.shape[2]
    N = (P - R) // 2
    if not (1 <= K <= MAX_TAPS and 1 <= N <= MAX_STATE and R >= 1 and D >= 1 and len(args.reverse) == G >= 1):
        return False
    shapes = (
        (dim,),
        (2 * D, dim),
        (G, D, K),
        (G, D),
        (G, R + 2 * N, D),
        (G, D, R),
        (G, D),
        (G, D, N),
        (G, D),
        (dim, D),
    )
    fits = all(t is None or t.shape == shape for t, shape in zip(args[1:11], shapes))
    return fits and args.rule in RULES and (A is None) == (args.rule != "mamba")


@operator("block")
def _block(
    x: Tensor,
    norm_weight: Tensor,
    in_proj: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor,
    x_proj: Tensor,
    dt_proj: Tensor,
    dt_bias: Tensor,
    A: Optional[Tensor],
    D: Tensor,
    out_proj: Tensor,
    rule: str,
    reverse: Sequence[int],
    eps: float,
    residual: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The result and, with `save`, what backward starts from (see `native_block`)."""
    weights = (conv_weight, conv_bias, x_proj, dt_proj, dt_bias, A, D, out_proj)
    args = BlockArguments(x, norm_weight, in_proj, *weights, rule, reverse, eps, residual)
    if not _fits(args):  # the operator may have been called by itself, or by a graph that was recorded of other tensors
        raise ValueError(
            "vilonghorn::block: takes float32 tensors on the CPU, of shapes that fit; call vilonghorn.ops.block"
        )
    return native_block.block_forward(args, save)


@torch.library.register_fake("vilonghorn::block")
def _(*args):
    *args, save = args
    results = native_block.empty_results(BlockArguments(*args), save)
    return results if save else native_block.out_alone(results[0])


@operator("block_backward")
def _block_backward(
    dout: Tensor,
    xz: Tensor,
    projected: Tensor,
    checkpoints: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    in_proj: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor,
    x_proj: Tensor,
    dt_proj: Tensor,
    dt_bias: Tensor,
    A: Optional[Tensor],
    D: Tensor,
    out_proj: Tensor,
    rule: str,
    reverse: Sequence[int],
    eps: float,
    residual: bool,
    wanted: Sequence[int],
) -> list[Tensor]:
    """Gradients of the tensors that are there, in the operator's order; `wanted` has a flag for each, absent ones included."""
    weights = (conv_weight, conv_bias, x_proj, dt_proj, dt_bias, A, D, out_proj)
    args = BlockArguments(x, norm_weight, in_proj, *weights, rule, reverse, eps, residual)
    return [
        grad for grad in native_block.block_backward(dout, xz, projected, checkpoints, args, wanted) if grad is not None
    ]


@torch.library.register_fake("vilonghorn::block_backward")
def _(dout, xz, projected, checkpoints, *args):
    return [grad for grad in native_block.empty_gradients(BlockArguments(*args[:-1]), args[-1]) if grad is not None]


_block_run = differentiate(_block, _block_backward)
