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
from ..ops.rules import inverse_softplus
from ..ops.validate import DTYPES, MAX_STATE

SMALLEST_STEP = 1e-20  # of a step without softplus: no number has a softplus of zero
KEYS = {2: "DN", 3: "BNL"}  # shapes of keys and queries by their dimensions; others have groups of channels


def check(function: str, **given: tuple[Tensor | None, Sequence]) -> None:
    """Checks tensors by argument name, each with its shape: sizes, or letters for sizes that are equal. None passes."""
    sizes, device = {}, None
    for name, (tensor, shape) in given.items():
        if tensor is None:
            continue
        dtype = getattr(tensor, "dtype", f"a {type(tensor).__name__}")
        if dtype not in DTYPES:
            if getattr(dtype, "is_complex", False):
                raise NotImplementedError(f"{function}: {name} is complex (S4D); the scans of vilonghorn are real")
            raise TypeError(f"{function}: {name} is {dtype}, expected a tensor of {', '.join(map(str, DTYPES))}")
        actual = tensor.shape
        fits = len(actual) == len(shape)
        if not fits or any([n != (sizes.setdefault(s, n) if isinstance(s, str) else s) for s, n in zip(shape, actual)]):
            expected = ", ".join(str(sizes.get(s, "any") if isinstance(s, str) else s) for s in shape)
            raise ValueError(f"{function}: {name} has shape {tuple(actual)}, expected ({expected})")
        if tensor.device != (device := device or tensor.device):
            raise ValueError(f"{function}: {name} is on {tensor.device}, expected {device} as for those before it")


def check_groups(function: str, size: int, parts: str, **counts: int) -> None:
    """Checks that arguments, by name, have numbers of groups into which so many parts are divided."""
    for name, count in counts.items():
        if count < 1 or size % count:
            raise ValueError(f"{function}: {name} has {count} groups, expected a divisor of the {size} {parts}")


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager:
    """Turns autocast off, if it is on: the functions of `mamba_ssm` keep the dtypes that they are given."""
    return contextlib.nullcontext() if autocast_dtype(x) is None else torch.autocast(x.device.type, enabled=False)


def selective_scan_fn(
    u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False, **options
) -> Tensor | tuple[Tensor, Tensor]:
    """`mamba_ssm.ops.selective_scan_interface.selective_scan_fn`: `vilonghorn.ops.scan` by rule "mamba".

    Values u, steps delta, gates z (batch, D, L), delta perhaps with fewer channels, which are repeated; decay rates A
    (D, N); keys B, queries C (batch, N, L), (batch, G, N, L) for G groups of channels, or constant, (D, N); D and
    delta_bias (D,). Returns (batch, D, L) of u's dtype and order in memory, perhaps with the last state, (batch, D, N),
    float32 or wider, with gradients. The options are ours: `state` before the first token, and `reverse`. Raises
    NotImplementedError for complex tensors, ValueError for shapes, devices and negative steps, TypeError for dtypes.
    """
    weights = (delta, A, B, C, D, delta_bias, delta_softplus)
    args = scan_arguments("selective_scan_fn", u, *weights, z=z, return_state=return_last_state, **options)
    parts = [args]
    if A.shape[1] > MAX_STATE:  # the states of a channel do not mix, so that scans of up to 64 of them add up
        dims = dict(k=3, q=3, A=2, initial_state=2)
        cuts = {n: t.split(MAX_STATE, dim) for n, dim in dims.items() if (t := getattr(args, n)) is not None}
        first, *others = [args._replace(**dict(zip(cuts, part))) for part in zip(*cuts.values())]
        parts = [first, *(part._replace(D=None) for part in others)]
    with without_autocast(u):
        results = [scan(**part._asdict()) for part in parts]
    ys, states = zip(*results) if return_last_state else (results, ())
    y = ungroup(sum(ys[1:], ys[0]), args.channels_first)
    y = (y if z is None or args.z is not None else y * F.silu(z)).to(u.dtype)
    return (y, ungroup(torch.cat(states, 2))) if return_last_state else y


def scan_arguments(
    function, u, delta, A, B, C, D, delta_bias, delta_softplus, z=None, state=None, wide=False, reverse=False, **options
) -> ScanArguments:
    """The arguments of a scan, a direction for each group of channels; z if there is one group, of up to 64 states."""
    forms = [KEYS.get(getattr(t, "ndim", 2), f"B{groups}NL") for t, groups in ((B, "b"), (C, "c"))]
    others = dict(D=(D, "D"), delta_bias=(delta_bias, "S"), z=(z, "BDL"), state=(state, "BDN"))
    check(function, u=(u, "BDL"), delta=(delta, "BSL"), A=(A, "DN"), B=(B, forms[0]), C=(C, forms[1]), **others)
    (batch, dim, length), steps, states = u.shape, delta.shape[1], A.shape[1]
    groups = [{2: dim, 3: 1}.get(t.dim(), t.shape[1]) for t in (B, C)]
    check_groups(function, dim, "channels of u", delta=steps, B=groups[0], C=groups[1])
    G, dtypes = math.lcm(*groups), {u.dtype, delta.dtype, B.dtype, C.dtype}
    if wide or len(dtypes) > 1 or states > MAX_STATE or not delta_softplus:  # its inverse needs more than 8 bits
        dtype = functools.reduce(torch.promote_types, dtypes, torch.float32)
        u, delta, B, C = (t.to(dtype) for t in (u, delta, B, C))
    if not delta_softplus:
        step = delta if delta_bias is None else delta + delta_bias.to(delta.dtype)[:, None]
        delta, delta_bias = _before_softplus(function, step), None
    if steps != dim:
        delta = delta.repeat_interleave(dim // steps, 1)
        delta_bias = None if delta_bias is None else delta_bias.repeat_interleave(dim // steps)

    def by_token(t: Tensor) -> Tensor:  # (G, batch, L, N); copied here, once for forward and backward, or not at all
        if t.dim() == 2:
            return t[:, None, None].expand(dim, batch, length, states)
        t = t.mT[None] if t.dim() == 3 else t.permute(1, 0, 3, 2)
        t = t if len(t) == G else t.repeat_interleave(G // len(t), 0)
        t = t[..., 0, None] if states == 1 else t  # with a stride of one
        return t if t.stride(-1) == 1 else t.contiguous()

    z = None if z is None or G > 1 or states > MAX_STATE else z.mT.to(u.dtype)
    A, D, delta_bias = (None if t is None else t.view(G, dim // G, *t.shape[1:]) for t in (A, D, delta_bias))
    x, dt, state = (None if t is None else by_group(t, G) for t in (u, delta, state))
    options |= dict(rule="mamba", reverse=[int(reverse)] * G, channels_first=u.stride(1) != 1)
    return ScanArguments(x, dt, by_token(B), by_token(C), z, A, D, delta_bias, state, **options)


def _before_softplus(function: str, step: Tensor) -> Tensor:
    """The number whose softplus is `step`; while torch compiles or exports, that of a negative step is NaN."""
    if not (is_tracing(step) or step.is_meta) and step.numel() and (least := step.detach().min().item()) < 0:
        expected = "expected 0 or more; clamp, or use softplus"
        raise ValueError(f"{function}: a step without softplus is {least:.3g}, {expected}")
    step = torch.where(step.detach().abs() < SMALLEST_STEP, step - step.detach() + SMALLEST_STEP, step)
    return inverse_softplus(step)


def by_group(t: Tensor, G: int) -> Tensor:
    """(batch, D, L) as (G, batch, L, D / G), without a copy."""
    batch, D, L = t.shape
    return t.mT[None] if G == 1 else t.view(batch, G, D // G, L).permute(1, 0, 3, 2)


def ungroup(t: Tensor, channels_first: bool = True) -> Tensor:
    """(G, batch, L, D / G) as (batch, D, L), which lies in memory so, or as (batch, L, D)."""
    return t.permute(1, 0, 3, 2).flatten(1, 2).contiguous() if channels_first else t.permute(1, 2, 0, 3).flatten(2).mT


def vmamba_fwd(u, delta, A, B, C, D, delta_bias, delta_softplus, nrows=1, out_float=False) -> list[Tensor]:
    """`fwd` of `selective_scan_cuda_core`: [out, x for `vmamba_bwd`]; N up to 64. `nrows` changes nothing."""
    weights = (delta, A, B, C, D, delta_bias, delta_softplus)
    args = scan_arguments("selective_scan_cuda_core", u, *weights, wide=out_float)
    run = DECOMPOSITIONS["scan"](args) if mode.decomposed else torch.ops.vilonghorn.scan(*flatten(args), True)
    return [ungroup(run[0], args.channels_first).to(args.x.dtype if out_float else u.dtype), run[-1]]


def vmamba_bwd(u, delta, A, B, C, D, delta_bias, dout, x, delta_softplus, nrows=1) -> list[Tensor | None]:
    """`bwd` of the same: gradients of u, delta, A, B, C, D and delta_bias by the states x, without a second scan."""
    given = leaves(u, delta, A, B, C, D, delta_bias)
    with torch.enable_grad():
        args = scan_arguments("selective_scan_cuda_core", *given, delta_softplus, wide=dout.dtype != u.dtype)
    flat = [t.detach() if isinstance(t, Tensor) else t for t in flatten(args)]
    dy, wanted = by_group(dout, len(args.x)).to(args.x.dtype), [int(t is not None) for t in tensors(args)]
    grads = torch.ops.vilonghorn.scan_backward(dy, None, x, *flat, wanted)
    return gradients([t for t in tensors(args) if t is not None], given, grads)


def cuda_fwd(u, delta, A, B, C, D, z, delta_bias, delta_softplus) -> list[Tensor]:
    """`fwd` of `selective_scan_cuda`: [out before the gate, x with the last state as x[:, :, -1, 1::2], gated out]."""
    out, state = selective_scan_fn(u, delta, A, B, C, D, None, delta_bias, delta_softplus, True)
    x = torch.stack([torch.ones_like(state), state], -1).flatten(2)[:, :, None]
    return [out, x] if z is None else [out, x, (out * F.silu(z)).to(out.dtype)]


def cuda_bwd(u, delta, A, B, C, D, z, delta_bias, dout, x, out, dz, delta_softplus, recompute_out_z=False) -> list:
    """`bwd` of the same by another scan: gradients of u, delta, A, B, C, D, delta_bias, z (into `dz`), gated out."""
    given = leaves(u, delta, A, B, C, D, z, delta_bias)
    with torch.enable_grad():
        y = selective_scan_fn(*given, delta_softplus)
    *grads, of_z, of_bias = gradients([y], given, [dout])
    of_z = of_z if dz is None else dz.copy_(of_z)
    return [*grads, of_bias, *([] if z is None else [of_z, y.detach()][: 1 + recompute_out_z])]


def leaves(*given: Tensor | None) -> list[Tensor | None]:
    """Tensors whose gradients are wanted, None for None."""
    return [None if t is None else t.detach().requires_grad_() for t in given]


def gradients(results: Sequence[Tensor], given: Sequence[Tensor | None], grads: Sequence[Tensor]) -> list:
    """The gradients of `given` by those of `results`, None for None."""
    found = iter(torch.autograd.grad(results, [t for t in given if t is not None], grads))
    return [None if t is None else next(found) for t in given]


def selective_state_update(
    state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False, state_batch_indices=None
) -> Tensor:
    """`mamba_ssm`'s scan of one token, which writes the next state into `state`.

    With H heads: state (batch, H, D, N), x, dt and z (batch, H, D), A (H, D, N), B and C (batch, G, N) with G a divisor
    of H, D and dt_bias (H, D); else without H and G. `state_batch_indices`: rows of `state`, (batch,). Returns as x.
    """
    H, G = "HG" if state.dim() == 4 else ("", "")
    shapes = dict(x=(x, f"B{H}D"), dt=(dt, f"B{H}D"), z=(z, f"B{H}D"), B=(B, f"B{G}N"), C=(C, f"B{G}N"))
    shapes |= dict(A=(A, f"{H}DN"), D=(D, f"{H}D"), dt_bias=(dt_bias, f"{H}D"), state=(state, f"S{H}DN"))
    check("selective_state_update", **shapes)
    if H:
        check_groups("selective_state_update", x.shape[1], "heads", B=B.shape[1])
    u, delta, z = (None if t is None else t.flatten(1)[..., None] for t in (x, dt, z))
    D, dt_bias = (None if t is None else t.flatten() for t in (D, dt_bias))
    weights = (A.flatten(0, -2), B[..., None], C[..., None], D, z, dt_bias)
    rows = slice(None) if state_batch_indices is None else state_batch_indices
    y, last = selective_scan_fn(u, delta, *weights, dt_softplus, True, state=state[rows].flatten(1, -2))
    state[rows] = last.view(-1, *state.shape[1:]).to(state.dtype)
    return y.view(x.shape)
