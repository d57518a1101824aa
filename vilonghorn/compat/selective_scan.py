"""The selective scan as `mamba_ssm` and VMamba's extensions call it: channels before tokens, groups of channels."""

import contextlib
import functools
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops import scan
from ..ops._torch import autocast_dtype, is_tracing
from ..ops.arguments import ScanArguments, flatten, tensors
from ..ops.register import DECOMPOSITIONS, mode
from ..ops.validate import DTYPES, MAX_STATE

SMALLEST_STEP = 1e-20  # of a step without softplus: no number has a softplus of zero


def check(function: str, **expected: tuple[Tensor | None, Sequence[int | None] | None]) -> None:
    """Checks tensors by argument name, each with its shape (None: any; within a shape: any size). None passes.

    Raises NotImplementedError for complex tensors, TypeError for no tensor of `DTYPES`, ValueError for a shape, or
    another device than the first one's.
    """
    device = None
    for name, (tensor, shape) in expected.items():
        if tensor is None:
            continue
        dtype = getattr(tensor, "dtype", f"a {type(tensor).__name__}")
        if isinstance(dtype, torch.dtype) and dtype.is_complex:
            raise NotImplementedError(f"{function}: {name} is complex (S4D); the scans of vilonghorn are real")
        if dtype not in DTYPES:
            raise TypeError(f"{function}: {name} is {dtype}, expected a tensor of {', '.join(map(str, DTYPES))}")
        sizes = shape or [None] * tensor.dim()
        if len(sizes) != tensor.dim() or any(n is not None and n != size for n, size in zip(sizes, tensor.shape)):
            sizes = ", ".join("any" if n is None else str(n) for n in sizes)
            raise ValueError(f"{function}: {name} has shape {tuple(tensor.shape)}, expected ({sizes})")
        if tensor.device != (device := device or tensor.device):
            raise ValueError(f"{function}: {name} is on {tensor.device}, expected {device} as for those before it")


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager:
    """Turns autocast off, if it is on: the functions of `mamba_ssm` keep the dtypes that they are given."""
    return contextlib.nullcontext() if autocast_dtype(x) is None else torch.autocast(x.device.type, enabled=False)


def inverse_softplus(function: str, step: Tensor) -> Tensor:
    """The number whose softplus is `step`, float32 or float64; zero counts as 1e-20.

    Raises ValueError for a negative step. While torch compiles or exports, it becomes NaN instead.
    """
    if not (is_tracing(step) or step.is_meta) and step.numel() and (least := step.detach().min().item()) < 0:
        raise ValueError(
            f"{function}: a step without softplus is {least:.3g}, expected 0 or more; clamp, or use softplus"
        )
    step = torch.where(step.detach().abs() < SMALLEST_STEP, step - step.detach() + SMALLEST_STEP, step)
    return step + torch.log(-torch.expm1(-step))


def selective_scan_fn(
    u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False, *, state=None
) -> Tensor | tuple[Tensor, Tensor]:
    """`mamba_ssm.ops.selective_scan_interface.selective_scan_fn`: `vilonghorn.ops.scan` by rule "mamba".

    Values u, steps delta and gates z are (batch, D, L), delta perhaps with fewer channels, which are repeated; decay
    rates A (D, N), real; keys B and queries C (batch, N, L), (batch, G, N, L) for G groups of channels, or constant,
    (D, N); D and delta_bias (D,). Without `delta_softplus` steps must be at least zero. Returns (batch, D, L) of u's
    dtype and order in memory, perhaps with the last state, (batch, D, N), float32 or wider, which has gradients.
    `state`, (batch, D, N), is that before the first token.

    Raises:
        NotImplementedError: complex tensors.
        ValueError: shapes, devices, or negative steps.
        TypeError: dtypes other than float32, bfloat16, float16 and float64.
    """
    args = scan_arguments("selective_scan_fn", u, delta, A, B, C, D, delta_bias, delta_softplus)
    check("selective_scan_fn", u=(u, None), z=(z, u.shape), state=(state, (*u.shape[:2], A.shape[1])))
    x, dt, k, q, _, A, D, delta_bias, *_ = args
    G, is_fused = len(x), len(x) == 1 and A.shape[2] <= MAX_STATE
    if A.shape[2] > MAX_STATE:  # the sum is rounded once
        x, dt, k, q = (t.to(args.compute_dtype) for t in (x, dt, k, q))
    options = dict(z=z.mT.to(x.dtype) if z is not None and is_fused else None, dt_bias=delta_bias, rule="mamba")
    options |= dict(reverse=args.reverse, return_state=return_last_state, channels_first=args.channels_first)
    parts = [t.split(MAX_STATE, -1) for t in (k, q, A)]
    parts.append([None] * len(parts[0]) if state is None else by_group(state, G).split(MAX_STATE, 2))
    ys, states = [], []  # the states of a channel do not mix, so that scans of up to 64 of them add up
    with without_autocast(x):
        for k_part, q_part, A_part, start in zip(*parts):
            skip = None if ys else D
            y = scan(x, dt, k_part, q_part, A=A_part, D=skip, initial_state=start, **options)
            y, *last = y if return_last_state else (y,)
            ys.append(y), states.extend(last)
    out = channels_first(sum(ys[1:], ys[0]), u)
    out = (out if z is None or is_fused else out * F.silu(z)).to(u.dtype)
    return (out, channels_first(torch.cat(states, 2), u)) if return_last_state else out


def scan_arguments(function: str, u, delta, A, B, C, D, delta_bias, delta_softplus: bool) -> ScanArguments:
    """The arguments of `scan`, checked, with a direction for each group of channels."""
    check(function, u=(u, (None,) * 3), delta=(delta, (None,) * 3), A=(A, (None, None)), B=(B, None), C=(C, None))
    (batch, dim, length), steps, states = u.shape, delta.shape[1], A.shape[1]
    shapes = {2: (dim, states), 3: (batch, states, length)}
    keys = {name: (t, shapes.get(t.dim(), (batch, None, states, length))) for name, t in dict(B=B, C=C).items()}
    pairs = dict(u=(u, u.shape), delta=(delta, (batch, steps, length)), A=(A, (dim, states)), D=(D, (dim,)), **keys)
    check(function, **pairs, delta_bias=(delta_bias, (steps,)))
    groups = dict(delta=steps) | {name: {2: dim, 3: 1}.get(t.dim(), t.shape[1]) for name, t in dict(B=B, C=C).items()}
    for name, count in groups.items():
        if count < 1 or dim % count:
            raise ValueError(f"{function}: {name} has {count} groups, expected a divisor of the {dim} channels of u")
    G = math.lcm(groups["B"], groups["C"])
    wide = () if delta_softplus else (torch.float32,)  # the inverse of softplus needs more than 8 bits
    dtype = functools.reduce(torch.promote_types, (u.dtype, delta.dtype, B.dtype, C.dtype, *wide))
    if not delta_softplus:
        delta = delta.to(dtype) if delta_bias is None else delta.to(dtype) + delta_bias.to(dtype)[:, None]
        delta, delta_bias = inverse_softplus(function, delta), None
    if steps != dim:
        delta = delta.repeat_interleave(dim // steps, 1)
        delta_bias = None if delta_bias is None else delta_bias.repeat_interleave(dim // steps)

    def by_token(t: Tensor) -> Tensor:  # keys as (G, batch, L, N); copies are made once, for forward and backward
        if t.dim() == 2:
            return t[:, None, None].to(dtype).expand(dim, batch, length, states)
        t = (t.mT[None] if t.dim() == 3 else t.permute(1, 0, 3, 2)).to(dtype)
        return (t if len(t) == G else t.repeat_interleave(G // len(t), 0)).contiguous()

    x, dt = (by_group(t.to(dtype), G) for t in (u, delta))
    A, D, delta_bias = (None if t is None else t.unflatten(0, (G, dim // G)) for t in (A, D, delta_bias))
    options = dict(rule="mamba", reverse=[0] * G, channels_first=u.stride(1) != 1)
    return ScanArguments(x, dt, by_token(B), by_token(C), A=A, D=D, dt_bias=delta_bias, **options)


def by_group(t: Tensor, G: int) -> Tensor:
    """(batch, D, L) as (G, batch, L, D / G), without a copy."""
    return t.unflatten(1, (G, t.shape[1] // G)).permute(1, 0, 3, 2)


def channels_first(y: Tensor, like: Tensor) -> Tensor:
    """(G, batch, L, D / G) as (batch, D, L), in memory in the order of `like`."""
    is_last = like.stride(1) == 1
    return y.permute(1, 2, 0, 3).flatten(2).mT if is_last else y.permute(1, 0, 3, 2).flatten(1, 2).contiguous()


def vmamba_fwd(u, delta, A, B, C, D, delta_bias, delta_softplus, nrows=1, out_float=False) -> list[Tensor]:
    """`fwd` of `selective_scan_cuda_core` and `_oflex`: [out, what `vmamba_bwd` needs as x]; N up to 64.

    Arguments as `selective_scan_fn`; with `out_float` out is float32 or wider. `nrows` changes nothing.
    """
    args = _vmamba_arguments((u, delta, A, B, C, D, delta_bias), delta_softplus, out_float)
    if mode.decomposed:
        y, states = DECOMPOSITIONS["scan"](args)
    else:
        y, _, states = torch.ops.vilonghorn.scan(*flatten(args), True)
    return [channels_first(y, u).to(args.x.dtype if out_float else u.dtype), states]


def vmamba_bwd(u, delta, A, B, C, D, delta_bias, dout, x, delta_softplus, nrows=1) -> list[Tensor | None]:
    """`bwd` of the same: gradients of u, delta, A, B, C, D and delta_bias by the states x, without a second scan."""
    given = [None if t is None else t.detach().requires_grad_() for t in (u, delta, A, B, C, D, delta_bias)]
    with torch.enable_grad():
        args = _vmamba_arguments(given, delta_softplus, dout.dtype != u.dtype)
    flat = [t.detach() if isinstance(t, Tensor) else t for t in flatten(args)]
    dy, wanted = by_group(dout, len(args.x)).to(args.x.dtype), [int(t is not None) for t in tensors(args)]
    grads = torch.ops.vilonghorn.scan_backward(dy, None, x, *flat, wanted)
    return _gradients([t for t in tensors(args) if t is not None], given, grads)


def _vmamba_arguments(given: Sequence[Tensor | None], delta_softplus: bool, out_float: bool) -> ScanArguments:
    args = scan_arguments("selective_scan_cuda_core", *given, delta_softplus)
    dtype = args.compute_dtype if out_float else args.x.dtype
    return args._replace(**{name: getattr(args, name).to(dtype) for name in ("x", "dt", "k", "q")})


def _gradients(results: Sequence[Tensor], given: Sequence[Tensor | None], grads: Sequence[Tensor]) -> list:
    found = iter(torch.autograd.grad(results, [t for t in given if t is not None], grads))
    return [None if t is None else next(found) for t in given]


def cuda_fwd(u, delta, A, B, C, D, z, delta_bias, delta_softplus) -> list[Tensor]:
    """`fwd` of `selective_scan_cuda`: [out before the gate, x with the last state as x[:, :, -1, 1::2], gated out]."""
    out, state = selective_scan_fn(u, delta, A, B, C, D, None, delta_bias, delta_softplus, True)
    x = torch.stack([torch.ones_like(state), state], -1).flatten(2)[:, :, None]
    return [out, x] if z is None else [out, x, (out * F.silu(z)).to(out.dtype)]


def cuda_bwd(
    u, delta, A, B, C, D, z, delta_bias, dout, x, out, dz, delta_softplus, recompute_out_z=False
) -> list[Tensor | None]:
    """`bwd` of the same by another scan: gradients of u, delta, A, B, C, D, delta_bias, z (into `dz`), gated out."""
    given = [None if t is None else t.detach().requires_grad_() for t in (u, delta, A, B, C, D, delta_bias, z)]
    with torch.enable_grad():
        y = selective_scan_fn(*given[:6], z=given[7], delta_bias=given[6], delta_softplus=delta_softplus)
    *grads, last = _gradients([y], given, [dout])
    last = last if dz is None else dz.copy_(last)
    return [*grads, *([] if z is None else [last, y.detach()][: 1 + recompute_out_z])]


def selective_state_update(
    state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False, state_batch_indices=None
) -> Tensor:
    """`mamba_ssm`'s scan of one token, which writes the next state into `state`.

    With H heads: state (batch, H, D, N), x, dt and z (batch, H, D), A (H, D, N), B and C (batch, G, N) with G a divisor
    of H, D and dt_bias (H, D); else without H and G. `state_batch_indices`: rows of `state`, (batch,). Returns as x.
    """
    if state.dim() == 3:
        B, C = B.unsqueeze(1), C.unsqueeze(1)
    rows = slice(None) if state_batch_indices is None else state_batch_indices
    check(
        "selective_state_update", x=(x, (None,) * (state.dim() - 1)), state=(state, (None, *x.shape[1:], A.shape[-1]))
    )
    check("selective_state_update", x=(x, None), B=(B, (len(x), None, A.shape[-1])), C=(C, B.shape))
    if state.dim() == 4 and x.shape[1] % B.shape[1]:
        raise ValueError(f"selective_state_update: B has {B.shape[1]} groups, expected a divisor of {x.shape[1]} heads")
    u, delta, z = (None if t is None else t.flatten(1)[..., None] for t in (x, dt, z))
    D, dt_bias = (None if t is None else t.flatten() for t in (D, dt_bias))
    weights = (A.flatten(0, -2), B[..., None], C[..., None], D, z, dt_bias)
    y, last = selective_scan_fn(u, delta, *weights, dt_softplus, True, state=state[rows].flatten(1, -2))
    state[rows] = last.reshape(state[rows].shape).to(state.dtype)
    return y.reshape(x.shape)
