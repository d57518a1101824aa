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

from ._torch import autocast_dtype
from .arguments import MambaInnerArguments, MixerWeights
from .backends import choose_conv, cpu, cuda, has_rule, runs_in_chunks
from .conv import conv2d_silu, conv_silu
from .norm import rms_norm
from .register import register_op
from .rules import NO_RULE
from .scan import scan
from .validate import check_flags, flatten_weights, validate_mamba_inner

SCAN_NORM_EPS = 1e-6
Op = Callable[..., Tensor]


def mamba_inner(
    xz: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor,
    x_proj: Tensor | None = None,
    dt_proj: Tensor | None = None,
    dt_bias: Tensor | None = None,
    A: Tensor | None = None,
    D: Tensor | None = None,
    scan_norm: Tensor | None = None,
    rule: str = "longhorn",
    reverse: Sequence[bool] = (False, True),
    grid: Sequence[int] | None = None,
    valid: Tensor | None = None,
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
            `conv2d_silu`, (S, D, height, width): in the kernel on a CPU with the native library, for one direction of
            3 x 3 without a class token also with the CUDA library, else composed.
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
        valid: (B, L), True for the tokens that count. The convolution reads zeros at the others, their key is zero, so
            Longhorn's rules leave the state as it is, and y is zero there. Composed of smaller operators, except with
            rule "none".

    Returns:
        y, (B, L, D), of xz's dtype (under autocast of its dtype, but not on a CPU with the native library).

    Raises:
        ValueError: shapes, devices, heads or a rule that do not fit; `valid` with a convolution over the sequence,
            or with a rule that decays its state.
        TypeError: weights that are missing, a dtype outside float32, bfloat16, float16 and float64, or flags other than
            True and False.
    """
    weights = MixerWeights(conv_weight, conv_bias, x_proj, dt_proj, dt_bias, A, D)
    if valid is not None:
        xz = _zero_invalid(xz, valid, weights, scan_norm)
    args = check_arguments(xz, weights, scan_norm, rule, reverse, grid)
    if valid is not None and rule != NO_RULE:
        return mamba_inner_composed(args, valid=valid)
    if scan_norm is not None:
        return shared_directions(args, scan_norm, reverse, scan, rms_norm, conv_silu)
    if cpu.unavailable(xz.device.type) is None and has_rule(cpu.NAME, rule):
        return _run_cpu(args)
    dtype = autocast_dtype(xz) or xz.dtype
    if choose_conv(xz.device, dtype, None) == cuda.NAME and has_rule(cuda.NAME, rule):
        sizes = validate_mamba_inner(args)
        if cuda.takes_mamba_inner(args):
            w: Any = args.weights
            if rule != NO_RULE:
                w = w._replace(x_proj=w.x_proj.to(dtype), dt_proj=w.dt_proj.to(dtype))
            in_chunks = sizes.H != sizes.D and runs_in_chunks(xz.device, dtype, rule, len(args.reverse) == 1)
            return _run_cuda(args._replace(xz=xz.to(dtype), weights=w, in_chunks=in_chunks))
    return mamba_inner_composed(args)


def check_arguments(
    xz: Tensor,
    weights: MixerWeights,
    scan_norm: Tensor | None,
    rule: str,
    reverse: Sequence[int],
    grid: Sequence[int] | None,
) -> MambaInnerArguments:
    """The arguments of the convolution and the projections, which shared directions compute once, as one direction."""
    flags = check_flags("mamba_inner", reverse)
    weights, conv_grid = flatten_weights("mamba_inner", weights, grid)
    if scan_norm is not None:
        if scan_norm.shape != (expected := (len(flags), weights.conv_weight.shape[1])):
            raise ValueError(f"mamba_inner: scan_norm has shape {tuple(scan_norm.shape)}, expected (G, D) = {expected}")
        flags = [0]
    return MambaInnerArguments(xz, weights, rule, flags, conv_grid)


def _zero_invalid(xz: Tensor, valid: Tensor, weights: MixerWeights, scan_norm: Tensor | None) -> Tensor:
    B, L, _ = xz.shape
    if valid.shape != (B, L):
        raise ValueError(f"mamba_inner: valid has shape {tuple(valid.shape)}, expected (B, L) = {(B, L)}")
    if weights.A is not None or weights.conv_weight.dim() != 4 or scan_norm is not None:
        needed = "a convolution over the grid, separate directions, and a rule without decay"
        raise ValueError(f"mamba_inner: valid needs {needed}")
    return torch.where(valid[..., None] == 0, 0.0, xz)


def mamba_inner_composed(args: MambaInnerArguments, backend: str | None = None, valid: Tensor | None = None) -> Tensor:
    """`mamba_inner` with separate directions, composed of smaller operators; `backend` is the one of its `scan`."""
    if args.rule == NO_RULE:
        z, u = convolve(args)
        return gated_mean(u.unbind(0), z)
    z, *activations = projections(args, valid=valid)
    options: dict[str, Any] = dict(rule=args.rule, reverse=args.reverse, reduce="mean", backend=backend)
    weights = args.weights
    return scan(*activations, z=z, A=weights.A, D=weights.D, dt_bias=weights.dt_bias, **options)


def gated_mean(directions: Sequence[Tensor], z: Tensor) -> Tensor:
    """The mean over the directions, each (B, L, D), times silu(z)."""
    first, *others = directions
    return sum(others, first) * F.silu(z) / len(directions)


def shared_directions(
    args: MambaInnerArguments, scan_norm: Tensor, reverse: Sequence[int], scan: Op, norm: Op, conv: Op
) -> Tensor:
    """`mamba_inner` with shared directions, of a `scan`, an `rms_norm` and a `conv_silu`."""
    z, u, dt, k, q = projections(args, conv)
    G = len(reverse)
    u, dt, k, q = (t.expand(G, -1, -1, -1) for t in (u, dt, k, q))
    w = args.weights
    A, D, dt_bias = (None if t is None else t.expand(G, *[-1] * (t.dim() - 1)) for t in (w.A, w.D, w.dt_bias))
    y = scan(u, dt, k, q, A=A, D=D, dt_bias=dt_bias, rule=args.rule, reverse=reverse)
    first, *others = (norm(y_g, weight, SCAN_NORM_EPS) for y_g, weight in zip(y.unbind(0), scan_norm.unbind(0)))
    return sum(others, first) * F.silu(z)


def convolve(args: MambaInnerArguments, conv: Op = conv_silu) -> tuple[Tensor, Tensor]:
    """z, (B, L, D), and u, (S, B, L, D). `conv` is over a sequence."""
    validate_mamba_inner(args)
    x, z = args.xz.chunk(2, dim=-1)
    filters, bias = args.weights.conv_weight, args.weights.conv_bias
    if not args.conv_grid:
        return z, conv(x, filters, bias, reverse=args.reverse)
    rows, columns, height, width = args.conv_grid
    return z, conv2d_silu(x, filters.unflatten(2, (height, width)), bias, (rows, columns))


def projections(args: MambaInnerArguments, conv: Op = conv_silu, valid: Tensor | None = None) -> tuple[Tensor, ...]:
    """z, (B, L, D); u, (S, B, L, D), dt, (S, B, L, H), k and q, (S, B, L, N); u, k and q are zero where not `valid`."""
    z, u = convolve(args, conv)
    u = u if valid is None else torch.where(valid[..., None] == 0, 0.0, u)
    _, B, L, _, N, _, R, _ = args.sizes
    weights: Any = args.weights
    projected = torch.bmm(u.flatten(1, 2), weights.x_proj.transpose(1, 2).to(u.dtype))  # (S, B * L, R + 2N)
    low, k, q = projected.split([R, N, N], dim=-1)
    dt = torch.bmm(low, weights.dt_proj.transpose(1, 2).to(low.dtype))
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
    "Tensor? D, Tensor? scan_norm, str rule, int[] reverse, SymInt[]? grid=None, Tensor? valid=None) -> Tensor",
)
torch.library.impl("vilonghorn::mamba_inner", "CompositeImplicitAutograd", mamba_inner)
