"""`mamba_inner`: what a mixer does between its input and output projections.

On a CPU with the native library, convolution, projections, scan and gate are one operator, which works in the cache and
recomputes in backward what forward does not save. With the CUDA library they are one operator too: its backward writes
every gradient in place. Elsewhere they are composed of `conv_silu`, products and `scan`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import is_exportable
from torch import Tensor

from .backends import choose_conv, cpu, cuda
from .chunked import scan_chunked
from .conv import conv2d_silu, conv_silu, conv_silu_scan_order
from .norm import rms_norm
from .register import native_export, register_op
from .scan import scan
from .scan_order import flip_reversed
from .validate import (
    MambaInnerArguments,
    autocast_dtype,
    check_flags,
    saved_state_dtype,
    validate_mamba_inner,
    with_grid,
)

SCAN_NORM_EPS = 1e-6


def mamba_inner(
    xz: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor,
    x_proj: Tensor,
    dt_proj: Tensor,
    dt_bias: Tensor,
    A: Tensor | None,
    D: Tensor,
    scan_norm: Tensor | None = None,
    rule: str = "longhorn",
    reverse: Sequence[bool] = (False, True),
    grid: Sequence[int] | None = None,
    heads: int | None = None,
) -> Tensor:
    """Mixes tokens along their sequence in G directions and gates the result.

    Separate directions (S = G sets of parameters): x and z are the halves of xz. For each direction
    u = `conv_silu`(x), (low, k, q) = u x_proj^T, dt = low dt_proj^T, then `scan`(u, dt, k, q, z=z, ..., reduce="mean").
    On a CPU with the native library all of it is float32 (float64 for float64 inputs); elsewhere the projections
    have xz's dtype.

    Shared directions (S = 1 and `scan_norm`), as in Longhorn's bidirectional reference: u is causal, dt, k and q are
    computed from it once, and each direction scans them in its own order;
    y = (sum over directions of rms_norm(scan)) * silu(z).

    Args:
        xz: values and gates side by side, (B, L, 2D), float32, bfloat16, float16 or float64, any strides.
        conv_weight: (S, D, K), the last of K for the present token; K from 1 to 64 (4 is specialised). Or of
            `conv2d_silu`, (S, D, height, width): in the kernel on a CPU with the native library, for 3 x 3 also with
            the CUDA library, else composed.
        conv_bias: (S, D).
        x_proj: (S, R + 2N, D): rows of dt's factor, k and q; N from 1 to 64 (16 is specialised).
        dt_proj: (S, D, R), R at least 1.
        dt_bias: (S, D).
        A: decay rates, negative, (S, D, N), for rule "mamba" only, else None.
        D: skip weights, (S, D).
        scan_norm: weights of each direction's RMSNorm, (G, D), for shared directions. Default: separate directions.
        rule: "longhorn" (default), "longhorn_exact" or "mamba".
        reverse: a flag for each direction: True reads from the last token to the first.
        grid: as in `conv2d_silu`.
        heads: number of runs of channels that share their rows of dt_proj and dt_bias, for `scan_chunked`, which runs
            separate directions of rule "longhorn_exact" where timm's `set_exportable` is on. Default: not used.

    Returns:
        y, (B, L, D), of xz's dtype (under autocast of its dtype, but not on a CPU with the native library).

    Raises:
        ValueError: shapes, devices, heads or a rule that do not fit.
        TypeError: a dtype outside float32, bfloat16, float16 and float64, or flags other than True and False.
    """
    flags = check_flags("mamba_inner", reverse)
    filters, grid_options = with_grid("mamba_inner", conv_weight, grid)
    weights = (filters, conv_bias, x_proj, dt_proj, dt_bias, A, D)
    args = MambaInnerArguments(xz, *weights, rule, flags if scan_norm is None else [0], grid_options)
    if heads is not None and (heads < 1 or D.shape[-1] % heads):
        raise ValueError(f"mamba_inner: heads is {heads}, expected a divisor of the {D.shape[-1]} channels")
    if scan_norm is not None:
        return _shared(args, scan_norm, reverse)
    if is_exportable():
        if heads is not None and rule == "longhorn_exact" and not native_export.is_on:
            return _chunked(args, heads)
        return mamba_inner_composed(args) if grid_options else _exportable(args)
    if cpu.unavailable(xz.device.type) is None:
        return _run_cpu(args)
    dtype = autocast_dtype(xz) or xz.dtype
    if choose_conv(xz.device.type, dtype, None) == cuda.NAME:
        validate_mamba_inner(args)
        if cuda.takes_mamba_inner(args, dtype):
            return _run_cuda(args._replace(xz=xz.to(dtype), x_proj=x_proj.to(dtype), dt_proj=dt_proj.to(dtype)))
    return mamba_inner_composed(args)


def mamba_inner_composed(args: MambaInnerArguments, backend: str | None = None) -> Tensor:
    """`mamba_inner` with separate directions, composed of smaller operators; `backend` as in `scan`."""
    z, *activations = projections(args)
    A, D, bias, rule, reverse = args.A, args.D, args.dt_bias, args.rule, [bool(flag) for flag in args.reverse]
    return scan(*activations, z=z, A=A, D=D, dt_bias=bias, rule=rule, reverse=reverse, reduce="mean", backend=backend)


def _exportable(args: MambaInnerArguments) -> Tensor:
    """`mamba_inner_composed` with few nodes in a graph: each reversed direction is flipped once, and once back."""
    z, *activations = projections(args, conv_silu_scan_order)
    reverse = [False] * len(args.reverse)
    y = scan(*activations, A=args.A, D=args.D, dt_bias=args.dt_bias, rule=args.rule, reverse=reverse)
    return _gated_mean(flip_reversed(y, args.reverse), z)


def _chunked(args: MambaInnerArguments, heads: int) -> Tensor:
    first = slice(None, None, args.D.shape[-1] // heads)  # channel of each head
    z, *activations = projections(args, channels=first)
    reverse = [bool(flag) for flag in args.reverse]
    y = scan_chunked(*activations, D=args.D, dt_bias=args.dt_bias[:, first], reverse=reverse)
    return _gated_mean(y.unbind(0), z)


def _gated_mean(directions: Sequence[Tensor], z: Tensor) -> Tensor:
    first, *others = directions
    return sum(others, first) * F.silu(z) / len(directions)


def _shared(args: MambaInnerArguments, scan_norm: Tensor, reverse: Sequence[bool]) -> Tensor:
    z, *activations = projections(args)
    G, D = len(reverse), z.shape[-1]
    if scan_norm.shape != (G, D):
        raise ValueError(f"mamba_inner: scan_norm has shape {tuple(scan_norm.shape)}, expected (G, D) = {(G, D)}")
    u, dt, k, q = (t.expand(G, -1, -1, -1) for t in activations)
    A, skip, dt_bias = (None if t is None else t.expand(G, *t.shape[1:]) for t in (args.A, args.D, args.dt_bias))
    y = scan(u, dt, k, q, A=A, D=skip, dt_bias=dt_bias, rule=args.rule, reverse=reverse)
    first, *others = (rms_norm(y_g, weight, SCAN_NORM_EPS) for y_g, weight in zip(y.unbind(0), scan_norm.unbind(0)))
    return sum(others, first) * F.silu(z)


def projections(
    args: MambaInnerArguments, conv: Callable[..., Tensor] = conv_silu, channels: slice = slice(None)
) -> tuple[Tensor, ...]:
    """z, (B, L, D); u and dt, (S, B, L, D), dt of `channels` only; k and q, (S, B, L, N). `conv` is over a sequence."""
    _, B, L, _, N, _, R = validate_mamba_inner(args)
    x, z = args.xz.chunk(2, dim=-1)
    if args.conv_grid:
        rows, columns, height, width = args.conv_grid
        u = conv2d_silu(x, args.conv_weight.unflatten(2, (height, width)), args.conv_bias, (rows, columns))
    else:
        u = conv(x, args.conv_weight, args.conv_bias, reverse=[bool(flag) for flag in args.reverse])
    projected = torch.bmm(u.flatten(1, 2), args.x_proj.mT.to(u.dtype))  # (S, B * L, R + 2N)
    low, k, q = projected.split([R, N, N], dim=-1)
    dt = torch.bmm(low, args.dt_proj[:, channels].mT.to(low.dtype))
    return z, u, *(t.unflatten(1, (B, L)) for t in (dt, k, q))


def _fake_cpu(args: MambaInnerArguments, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    G, B, L, D, N, _, R = sizes = args.sizes
    dtype = torch.promote_types(args.xz.dtype, torch.float32)
    projected = (G, B, L, R + 2 * N) if save else (0,)
    checkpoints = sizes.num_saved_states(cpu.CHUNK, cpu.LANES) if save else 0
    new = args.xz.new_empty
    return new(B, L, D), new(projected, dtype=dtype), new(checkpoints, dtype=dtype)


def _fake_cuda(args: MambaInnerArguments, save: bool) -> tuple[Tensor, ...]:
    G, B, L, D, N, _, R = sizes = args.sizes
    new = args.xz.new_empty
    shapes = [(G, B, L, D), (G, B * L, R + 2 * N), (G, B, L, D)] if save else [(0,)] * 3
    checkpoints = sizes.num_saved_states(cuda.CHUNK, cuda.LANES) if save else 0
    dtype = saved_state_dtype(cuda.kernel_dtype(args.xz.dtype, N), args.rule)
    return new(B, L, D), *map(new, shapes), new(checkpoints, dtype=dtype)


def _register(backend: Any, num_saved: int, fake: Callable) -> Callable[[MambaInnerArguments], Tensor]:
    return register_op(
        f"mamba_inner_{backend.NAME}",
        MambaInnerArguments,
        validate_mamba_inner,
        num_saved=num_saved,
        forward=backend.mamba_inner_forward,
        fake=fake,
        backward=lambda dy, saved, args, wanted: backend.mamba_inner_backward(dy, args, *saved),
    )


_run_cpu = _register(cpu, 2, _fake_cpu)
_run_cuda = _register(cuda, 4, _fake_cuda)

# A composite operator: torch.fx and TorchScript see one call, autograd and compilers see what it runs.
torch.library.define(
    "vilonghorn::mamba_inner",
    "(Tensor xz, Tensor conv_weight, Tensor conv_bias, Tensor x_proj, Tensor dt_proj, Tensor dt_bias, Tensor? A, "
    "Tensor D, Tensor? scan_norm, str rule, int[] reverse, SymInt[]? grid=None, int? heads=None) -> Tensor",
)
torch.library.impl("vilonghorn::mamba_inner", "CompositeImplicitAutograd", mamba_inner)
