"""`mamba_inner`: what a mixer does between its input and output projections.

On a CPU with the native library, convolution, projections, scan and gate are one operator, which works in the cache and
recomputes in backward what forward does not save. With the CUDA library they are one operator too: its backward writes
every gradient in place. Elsewhere they are composed of `conv_silu`, products and `scan`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .arguments import MambaInnerArguments, ScanArguments
from .backends import choose_conv, cpu, cuda, has_rule
from .conv import conv2d_silu, conv_silu, conv_silu_scan_order
from .norm import rms_norm, rms_norm_exportable
from .register import register_op
from .rules import NO_RULE
from .scan import scan, scan_exportable
from .scan_order import flip_reversed
from .validate import autocast_dtype, check_flags, flatten_filter, validate_mamba_inner

SCAN_NORM_EPS = 1e-6


def mamba_inner(
    xz: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor,
    x_proj: Tensor | None,
    dt_proj: Tensor | None,
    dt_bias: Tensor | None,
    A: Tensor | None,
    D: Tensor | None,
    scan_norm: Tensor | None = None,
    rule: str = "longhorn",
    reverse: Sequence[bool] = (False, True),
    grid: Sequence[int] | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Mixes tokens along their sequence in G directions and gates the result, by any rule (the name is of mamba_ssm).

    Separate directions (S = G sets of parameters): x and z are the halves of xz. For each direction
    u = `conv_silu`(x), (low, k, q) = u x_proj^T, dt = low dt_proj^T, then `scan`(u, dt, k, q, z=z, ..., reduce="mean").
    On a CPU with the native library all of it is float32 (float64 for float64 inputs); elsewhere the projections
    have xz's dtype.

    Shared directions (S = 1 and `scan_norm`), as in Longhorn's bidirectional reference: u is causal, dt, k and q are
    computed from it once, and each direction scans them in its own order;
    y = (sum over directions of rms_norm(scan)) * silu(z).

    Rule "none", the gated convolution of MambaOut (Yu and Wang, arXiv 2405.07992): y = (mean of u) * silu(z).

    Args:
        xz: values and gates side by side, (B, L, 2D), float32, bfloat16, float16 or float64, any strides.
        conv_weight: (S, D, K), the last of K for the present token; K from 1 to 64 (4 is specialised). Or of
            `conv2d_silu`, (S, D, height, width): in the kernel on a CPU with the native library, for 3 x 3 also with
            the CUDA library, else composed.
        conv_bias: (S, D).
        x_proj: (S, R + 2N, D): rows of dt's factor, k and q; N from 1 to 64 (16 is specialised). None, as the following
            weights, with rule "none".
        dt_proj: (S, H, R), R at least 1. The D / H channels of each of H heads share dt; H = D: a dt for each channel.
        dt_bias: (S, H).
        A: decay rates, negative, (S, D, N), for rule "mamba" only, else None.
        D: skip weights, (S, D).
        scan_norm: weights of each direction's RMSNorm, (G, D), for shared directions. Default: separate directions.
        rule: "longhorn" (default), "longhorn_exact", "mamba" or "none".
        reverse: a flag for each direction: True reads from the last token to the first.
        grid: as in `conv2d_silu`.
        mask: (B, L), True for the tokens that count. The convolution reads zeros at the others, their key is zero, so
            Longhorn's rules leave the state as it is, and y is zero there. Composed of smaller operators, except with
            rule "none".

    Returns:
        y, (B, L, D), of xz's dtype (under autocast of its dtype, but not on a CPU with the native library).

    Raises:
        ValueError: shapes, devices, heads or a rule that do not fit; a mask with a convolution over the sequence, or
            with a rule that decays its state.
        TypeError: weights that are missing, a dtype outside float32, bfloat16, float16 and float64, or flags other than
            True and False.
    """
    if mask is not None:
        xz = _masked(xz, mask, conv_weight, A, scan_norm)
    args = _arguments(xz, conv_weight, conv_bias, x_proj, dt_proj, dt_bias, A, D, scan_norm, rule, reverse, grid)
    if mask is not None and rule != NO_RULE:
        return mamba_inner_composed(args, mask=mask)
    if scan_norm is not None:
        return _shared(args, scan_norm, reverse, scan, rms_norm)
    if cpu.unavailable(xz.device.type) is None and has_rule(cpu.NAME, rule):
        return _run_cpu(args)
    dtype = autocast_dtype(xz) or xz.dtype
    if choose_conv(xz.device, dtype, None) == cuda.NAME and has_rule(cuda.NAME, rule):
        validate_mamba_inner(args)
        if cuda.takes_mamba_inner(args, dtype):
            weights = (args.x_proj.to(dtype), args.dt_proj.to(dtype))  # type: ignore[union-attr]
            return _run_cuda(args._replace(xz=xz.to(dtype), x_proj=weights[0], dt_proj=weights[1]))
    return mamba_inner_composed(args)


def mamba_inner_exportable(
    xz: Tensor, *others: Any, scan_function: Callable[[ScanArguments], Tensor] = scan_exportable
) -> Tensor:
    """`mamba_inner` in torch's own operators, with few nodes in a captured graph; `scan_function` computes the scan.

    `others` are all further arguments of `mamba_inner`, in their order.
    """
    scan_norm, _, reverse, _ = others[7:]
    args = _arguments(xz, *others)

    def run_scan(x: Tensor, dt: Tensor, k: Tensor, q: Tensor, **options: Any) -> Tensor:
        return scan_function(ScanArguments(x, dt, k, q, **options))

    if scan_norm is not None:
        return _shared(args, scan_norm, reverse, run_scan, rms_norm_exportable, conv_silu_scan_order)
    in_order = not args.conv_grid  # conv_silu_scan_order has flipped the tokens, once for all that follows
    if args.rule == NO_RULE:
        z, y = convolve(args, conv_silu_scan_order)
    else:
        z, *activations = projections(args, conv_silu_scan_order)
        flags = [0 if in_order else flag for flag in args.reverse]
        y = run_scan(*activations, A=args.A, D=args.D, dt_bias=args.dt_bias, rule=args.rule, reverse=flags)
    return _gated_mean(flip_reversed(y, args.reverse if in_order else [0] * len(args.reverse)), z)


def _arguments(xz: Tensor, conv_weight: Tensor, *others: Any) -> MambaInnerArguments:
    *weights, scan_norm, rule, reverse, grid = others
    flags = check_flags("mamba_inner", reverse)
    filters, conv_grid = flatten_filter("mamba_inner", conv_weight, grid)
    if scan_norm is not None:
        if scan_norm.shape != (expected := (len(flags), filters.shape[1])):
            raise ValueError(f"mamba_inner: scan_norm has shape {tuple(scan_norm.shape)}, expected (G, D) = {expected}")
        flags = [0]
    arguments: Any = (xz, filters, *weights, rule, flags, conv_grid)
    return MambaInnerArguments(*arguments)


def _masked(xz: Tensor, mask: Tensor, conv_weight: Tensor, A: Tensor | None, scan_norm: Tensor | None) -> Tensor:
    if mask.shape != xz.shape[:2]:
        raise ValueError(f"mamba_inner: mask has shape {tuple(mask.shape)}, expected (B, L) = {tuple(xz.shape[:2])}")
    if A is not None or conv_weight.dim() != 4 or scan_norm is not None:
        raise ValueError(
            "mamba_inner: a mask needs a convolution over the grid, separate directions, and a rule without decay"
        )
    return xz * mask[..., None].to(xz.dtype)


def mamba_inner_composed(args: MambaInnerArguments, backend: str | None = None, mask: Tensor | None = None) -> Tensor:
    """`mamba_inner` with separate directions, composed of smaller operators; `backend` as in `scan`.

    `mask`, (B, L): False where the scan skips a token.
    """
    if args.rule == NO_RULE:
        z, u = convolve(args)
        return _gated_mean(u.unbind(0), z)
    z, *activations = projections(args, mask=mask)
    options: dict[str, Any] = dict(z=z, A=args.A, D=args.D, dt_bias=args.dt_bias, rule=args.rule, reverse=args.reverse)
    return scan(*activations, reduce="mean", backend=backend, **options)


def _gated_mean(directions: Sequence[Tensor], z: Tensor) -> Tensor:
    first, *others = directions
    return sum(others, first) * F.silu(z) / len(directions)


def _shared(
    args: MambaInnerArguments,
    scan_norm: Tensor,
    reverse: Sequence[bool],
    run_scan: Callable[..., Tensor],
    norm: Callable[..., Tensor],
    conv: Callable[..., Tensor] = conv_silu,
) -> Tensor:
    z, u, dt, k, q = projections(args, conv)
    G = len(reverse)
    u, dt, k, q = (t.expand(G, -1, -1, -1) for t in (u, dt, k, q))
    A, skip, dt_bias = (None if t is None else t.expand(G, *t.shape[1:]) for t in (args.A, args.D, args.dt_bias))
    y = run_scan(u, dt, k, q, A=A, D=skip, dt_bias=dt_bias, rule=args.rule, reverse=reverse)
    first, *others = (norm(y_g, weight, SCAN_NORM_EPS) for y_g, weight in zip(y.unbind(0), scan_norm.unbind(0)))
    return sum(others, first) * F.silu(z)


def convolve(args: MambaInnerArguments, conv: Callable[..., Tensor] = conv_silu) -> tuple[Tensor, Tensor]:
    """z, (B, L, D), and u, (S, B, L, D). `conv` is over a sequence."""
    validate_mamba_inner(args)
    x, z = args.xz.chunk(2, dim=-1)
    if not args.conv_grid:
        return z, conv(x, args.conv_weight, args.conv_bias, reverse=args.reverse)
    rows, columns, height, width = args.conv_grid
    filters = args.conv_weight.unflatten(2, (height, width))
    return z, conv2d_silu(x, filters, args.conv_bias, (rows, columns))


def projections(
    args: MambaInnerArguments, conv: Callable[..., Tensor] = conv_silu, mask: Tensor | None = None
) -> tuple[Tensor, ...]:
    """z, (B, L, D); u, (S, B, L, D), dt, (S, B, L, H), k and q, (S, B, L, N); u, k and q are zero where not `mask`."""
    z, u = convolve(args, conv)
    u = u if mask is None else u * mask[..., None].to(u.dtype)
    _, B, L, _, N, _, R, _ = args.sizes
    x_proj: Any = args.x_proj
    dt_proj: Any = args.dt_proj
    projected = torch.bmm(u.flatten(1, 2), x_proj.transpose(1, 2).to(u.dtype))  # (S, B * L, R + 2N)
    low, k, q = projected.split([R, N, N], dim=-1)
    dt = torch.bmm(low, dt_proj.transpose(1, 2).to(low.dtype))
    return z, u, *(t.unflatten(1, (B, L)) for t in (dt, k, q))


def _register(backend: Any, num_saved: int) -> Callable[[MambaInnerArguments], Tensor]:
    return register_op(
        f"mamba_inner_{backend.NAME}",
        MambaInnerArguments,
        validate_mamba_inner,
        num_saved=num_saved,
        forward=backend.mamba_inner_forward,
        fake=backend.mamba_inner_outputs,
        backward=lambda dy, saved, args, wanted: backend.mamba_inner_backward(dy, args, *saved),
    )


_run_cpu, _run_cuda = _register(cpu, 2), _register(cuda, 4)

# A composite operator: torch.fx and TorchScript see one call, autograd and compilers see what it runs.
torch.library.define(
    "vilonghorn::mamba_inner",
    "(Tensor xz, Tensor conv_weight, Tensor conv_bias, Tensor? x_proj, Tensor? dt_proj, Tensor? dt_bias, Tensor? A, "
    "Tensor? D, Tensor? scan_norm, str rule, int[] reverse, SymInt[]? grid=None, Tensor? mask=None) -> Tensor",
)
torch.library.impl("vilonghorn::mamba_inner", "CompositeImplicitAutograd", mamba_inner)
