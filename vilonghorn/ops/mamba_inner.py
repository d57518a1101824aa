"""`mix`: all that a mixer does after its input projection, as one operator on the CPU.

Convolution, projections, scan and gate share what is in cache, and backward makes again what forward did not keep. Where
there is no native library, the same is composed of `conv_silu`, products and `scan`, which suits a compiler on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import torch
import torch.nn.functional as F
from timm.layers import is_exportable
from torch import Tensor

from .backends import cpu as native
from .backends import cpu_mixer as native_mixer
from .conv import MAX_TAPS, conv_silu
from .register import differentiate, operator
from .scan import scan
from .validate import DTYPES, MAX_STATE, RULES, MixArguments, checkpoint_size, direction_flags, saves


def mix(
    xz: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor,
    x_proj: Tensor,
    dt_proj: Tensor,
    dt_bias: Tensor,
    A: Tensor | None,
    D: Tensor,
    out_proj: Tensor | None = None,
    *,
    rule: str = "longhorn",
    reverse: Sequence[bool] = (False, True),
) -> Tensor:
    """Mixes tokens along their sequence in G directions, which are averaged and gated.

    With x, z the halves of xz, for each direction: u = `conv_silu`(x); (low, k, q) = u x_proj^T; dt = low dt_proj^T; then
    `scan`(u, dt, k, q, z=z, A=A, D=D, dt_bias=dt_bias, reduce="mean"). Everything inside is float32 (float64 for float64
    inputs) on a CPU with the native library; elsewhere the projections are of xz's dtype.

    Args:
        xz: values and gates side by side, (B, L, 2D), float32, bfloat16, float16 or float64, any strides.
        conv_weight: taps, (G, D, K), the last one meeting the present token; K from 1 to 64 (4 is specialised).
        conv_bias: (G, D).
        x_proj: (G, R + 2N, D): rows of dt's factor, k and q; N from 1 to 64 (16 is specialised).
        dt_proj: (G, D, R), R at least 1.
        dt_bias: (G, D).
        A: decay rates, negative, (G, D, N), for rule "mamba" alone, else None.
        D: skip weights, (G, D).
        out_proj: projects y, (dim, D). Default: y itself. Given here rather than applied to y, it saves the memory of y in
            training.
        rule: "longhorn" (default), "longhorn_exact" or "mamba".
        reverse: a flag for each direction: True reads from the last token to the first.

    Returns:
        y, (B, L, D), or its projection, (B, L, dim), of xz's dtype.

    Raises:
        ValueError: shapes, devices or a rule that do not fit.
        TypeError: a dtype outside float32, bfloat16, float16 and float64, or what is no flag.
    """
    flags = direction_flags("mix", reverse)
    args = MixArguments(
        xz, conv_weight, conv_bias, x_proj, dt_proj, dt_bias, A, D, out_proj, rule, tuple(map(bool, flags))
    )
    _check(args)
    if is_exportable() or native.unavailable(xz.device.type) is not None:
        return mix_composed(args)
    return _run(*args[:10], flags, saves(args[:9]))[0]


def mix_composed(args: MixArguments, backend: str | None = None) -> Tensor:
    """`mix`, composed of the smaller operators; `backend` as in `scan`."""
    B, L, _ = args.sizes
    R = args.dt_proj.shape[-1]
    N = (args.x_proj.shape[1] - R) // 2
    x, z = args.xz.chunk(2, dim=-1)
    u = conv_silu(x, args.conv_weight, args.conv_bias, reverse=args.reverse)  # (G, B, L, D)
    projected = torch.bmm(u.flatten(1, 2), args.x_proj.mT.to(u.dtype))  # (G, B * L, R + 2N)
    low, k, q = projected.split([R, N, N], dim=-1)
    dt = torch.bmm(low, args.dt_proj.mT.to(low.dtype))
    dt, k, q = (t.unflatten(1, (B, L)) for t in (dt, k, q))
    y = scan(
        u,
        dt,
        k,
        q,
        z=z,
        A=args.A,
        D=args.D,
        dt_bias=args.dt_bias,
        rule=args.rule,
        reverse=args.reverse,
        reduce="mean",
        backend=backend,
    )
    return y if args.out_proj is None else F.linear(y, args.out_proj.to(y.dtype))


def _check(args: MixArguments) -> None:
    if args.rule not in RULES:
        raise ValueError(f"mix: rule is {args.rule!r}, expected one of {', '.join(map(repr, RULES))}")
    if (args.A is None) == (args.rule == "mamba"):
        needs = "needs A of shape (G, D, N)" if args.rule == "mamba" else "takes no A (only rule 'mamba' does)"
        raise ValueError(f"mix: rule {args.rule!r} {needs}")
    for name, dims in dict(xz=3, conv_weight=3, x_proj=3, dt_proj=3).items():
        if getattr(args, name).dim() != dims:
            raise ValueError(f"mix: {name} has shape {tuple(getattr(args, name).shape)}, expected {dims} dimensions")
    (G, D, K), R = args.conv_weight.shape, args.dt_proj.shape[-1]
    N = (args.x_proj.shape[1] - R) // 2
    if not (1 <= K <= MAX_TAPS and 1 <= N <= MAX_STATE and R >= 1 and len(args.reverse) == G >= 1):
        raise ValueError(
            f"mix: {G} directions with {len(args.reverse)} reverse flags, {K} taps, rank {R} and state size {N}; expected a "
            f"flag for each direction, 1 to {MAX_TAPS} taps, a rank of at least 1 and 1 to {MAX_STATE} states"
        )
    B, L, _ = args.xz.shape
    dim = 0 if args.out_proj is None else args.out_proj.shape[0]
    expected = dict(
        xz=(B, L, 2 * D),
        conv_bias=(G, D),
        x_proj=(G, R + 2 * N, D),
        dt_proj=(G, D, R),
        dt_bias=(G, D),
        A=(G, D, N),
        D=(G, D),
        out_proj=(dim, D),
    )
    for name, tensor in zip(args._fields, args[:9]):
        if tensor is None:
            continue
        if name in expected and tuple(tensor.shape) != expected[name]:
            raise ValueError(
                f"mix: {name} has shape {tuple(tensor.shape)}, expected {expected[name]} to go with conv_weight "
                f"{tuple(args.conv_weight.shape)} and dt_proj {tuple(args.dt_proj.shape)}"
            )
        if tensor.device != args.xz.device:
            raise ValueError(
                f"mix: {name} is on {tensor.device} but xz is on {args.xz.device}; move them to one device"
            )
        if tensor.dtype not in DTYPES:
            raise TypeError(f"mix: {name} is {tensor.dtype}, expected one of {', '.join(map(str, DTYPES))}")


@operator("mix")
def _mix(
    xz: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor,
    x_proj: Tensor,
    dt_proj: Tensor,
    dt_bias: Tensor,
    A: Optional[Tensor],
    D: Tensor,
    out_proj: Optional[Tensor],
    rule: str,
    reverse: Sequence[int],
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """y and, with `save`, what backward starts from: the projections and the states (in one dimension; see `scan`)."""
    args = MixArguments(
        xz, conv_weight, conv_bias, x_proj, dt_proj, dt_bias, A, D, out_proj, rule, tuple(map(bool, reverse))
    )
    y, projected, checkpoints = native_mixer.mix_forward(args, save)
    return y, projected if save else projected.new_empty(0), checkpoints


@torch.library.register_fake("vilonghorn::mix")
def _(xz, conv_weight, conv_bias, x_proj, dt_proj, dt_bias, A, D, out_proj, rule, reverse, save):
    B, L, width = xz.shape
    (G, P, _), R = x_proj.shape, dt_proj.shape[-1]
    y = xz.new_empty(B, L, width // 2 if out_proj is None else out_proj.shape[0])
    real = torch.float64 if xz.dtype == torch.float64 else torch.float32
    if not save:
        return y, y.new_empty(0, dtype=real), y.new_empty(0, dtype=real)
    states = checkpoint_size(G, B, L, (P - R) // 2, width // 2, native.CHUNK, native.LANES)
    return y, y.new_empty(G, B, L, P, dtype=real), y.new_empty(states, dtype=real)


@operator("mix_backward")
def _mix_backward(
    dy: Tensor,
    projected: Tensor,
    checkpoints: Tensor,
    xz: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor,
    x_proj: Tensor,
    dt_proj: Tensor,
    dt_bias: Tensor,
    A: Optional[Tensor],
    D: Tensor,
    out_proj: Optional[Tensor],
    rule: str,
    reverse: Sequence[int],
) -> list[Tensor]:
    """Gradients of the tensors that are there, in the operator's order."""
    args = MixArguments(
        xz, conv_weight, conv_bias, x_proj, dt_proj, dt_bias, A, D, out_proj, rule, tuple(map(bool, reverse))
    )
    return [grad for grad in native_mixer.mix_backward(dy, args, projected, checkpoints) if grad is not None]


@torch.library.register_fake("vilonghorn::mix_backward")
def _(dy, projected, checkpoints, xz, conv_weight, conv_bias, x_proj, dt_proj, dt_bias, A, D, out_proj, rule, reverse):
    inputs = (xz, conv_weight, conv_bias, x_proj, dt_proj, dt_bias, A, D, out_proj)
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in inputs if t is not None]


_run = differentiate(_mix, _mix_backward)
