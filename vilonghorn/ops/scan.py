"""`scan`, the operator: schema, fake kernel, autograd and autocast, side by side.

The arithmetic is in the backends; `dispatch` chooses among them. `torch.compile`, `torch.export` and autograd see one
opaque operator, `torch.ops.vilonghorn.scan`, whatever runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import torch
from timm.layers import is_exportable
from torch import Tensor

from .backends import choose
from .portable import scan_portable
from .register import differentiate, operator
from .validate import ScanArguments, autocast_dtype, check, checkpoint_size, direction_flags, saves


def scan(
    x: Tensor,
    dt: Tensor,
    k: Tensor,
    q: Tensor,
    *,
    z: Tensor | None = None,
    A: Tensor | None = None,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    rule: str = "longhorn",
    reverse: Sequence[bool] = (False,),
    reduce: str = "none",
    backend: str | None = None,
) -> Tensor:
    """Runs a selective state-space recurrence over L tokens, for G directions at once.

    For each direction, sequence and channel i, with a state s of N numbers that starts at zero:

    - "longhorn": eps = beta_i / (1 + beta_i |k|^2), beta_i = sigmoid(dt_i + dt_bias_i);
      s <- (1 - eps k^2) s + eps x_i k  (diagonal form of Longhorn, Liu et al., arXiv 2407.14207)
    - "longhorn_exact": s <- s + eps (x_i - s.k) k  (the closed form before its diagonal approximation)
    - "mamba": delta = softplus(dt_i + dt_bias_i); s <- exp(delta A_i) s + delta x_i k  (S6, arXiv 2312.00752; k is B, q is C)

    and y_i = s.q + D_i x_i, times silu(z_i). States, gates and sums are float32 (float64 for float64 inputs).

    Args:
        x: values, (G, B, L, D), float32, bfloat16, float16 or float64. Any strides; a contiguous last dimension is fastest.
        dt: steps before their bias and gate, (G, B, L, D), of x's dtype like k, q and z.
        k: keys, (G, B, L, N), N from 1 to 64 (16 is specialised).
        q: queries, (G, B, L, N).
        z: gate shared by the directions, (B, L, D). Default: no gate.
        A: decay rates, negative, (G, D, N); for rule "mamba" alone, which needs it.
        D: skip weights, (G, D). Default: no skip.
        dt_bias: bias of dt, (G, D). Default: none.
        rule: "longhorn" (default), "longhorn_exact" or "mamba".
        reverse: a flag for each direction: True scans from the last token to the first.
        reduce: "none" (default) keeps the directions apart, "mean" averages them before the gate.
        backend: a name of `vilonghorn.ops.backends()` to insist on; default: the first that can run on x's device,
            or `scan_portable` while timm's switch for export is on.

    Returns:
        y, of x's dtype: (G, B, L, D), or (B, L, D) with reduce="mean".

    Raises:
        ValueError: unknown rule, reduction or backend; shapes, devices or A that do not fit.
        TypeError: dtypes that do not fit, or what is no flag.
        RuntimeError: the backend asked for cannot run here.
    """
    for name, t in (("x", x), ("dt", dt), ("k", k), ("q", q)):
        if not isinstance(t, Tensor):
            raise TypeError(f"scan: {name} is {t!r}, expected a tensor")
    flags, dtype = direction_flags("scan", reverse), autocast_dtype(x)
    if dtype is not None:
        # Activations meet in the autocast dtype; A, D and dt_bias stay as they are: gates and states are float32 anyway.
        x, dt, k, q = x.to(dtype), dt.to(dtype), k.to(dtype), q.to(dtype)
        z = None if z is None else z.to(dtype)
    if backend is None and is_exportable():
        return scan_portable(ScanArguments(x, dt, k, q, z, A, D, dt_bias, rule, tuple(reverse), reduce))
    save = saves((x, dt, k, q, z, A, D, dt_bias))
    y, _ = _run(x, dt, k, q, z, A, D, dt_bias, rule, flags, reduce, save, backend)
    return y


@operator("scan")
def _scan(
    x: Tensor,
    dt: Tensor,
    k: Tensor,
    q: Tensor,
    z: Optional[Tensor],
    A: Optional[Tensor],
    D: Optional[Tensor],
    dt_bias: Optional[Tensor],
    rule: str,
    reverse: Sequence[int],
    reduce: str,
    save: bool,
    backend: Optional[str],
) -> tuple[Tensor, Tensor]:
    """y and, with `save`, the states that backward starts from, in one dimension: a number of chunks among the sizes
    would have torch.compile guard on its being one."""
    args = ScanArguments(x, dt, k, q, z, A, D, dt_bias, rule, tuple(map(bool, reverse)), reduce)
    check(args)
    return choose(x, backend).forward(args, save)


@torch.library.register_fake("vilonghorn::scan")
def _(x, dt, k, q, z, A, D, dt_bias, rule, reverse, reduce, save, backend):
    args = ScanArguments(x, dt, k, q, z, A, D, dt_bias, rule, tuple(map(bool, reverse)), reduce)
    check(args)
    y = x.new_empty(args.output_shape)
    if not save:
        return y, x.new_empty(0, dtype=args.compute_dtype)
    (G, B, L, D), backend = x.shape, choose(x, backend)
    return y, x.new_empty(
        checkpoint_size(G, B, L, k.shape[-1], D, backend.CHUNK, backend.LANES), dtype=args.compute_dtype
    )


@operator("scan_backward")
def _scan_backward(
    dy: Tensor,
    checkpoints: Tensor,
    x: Tensor,
    dt: Tensor,
    k: Tensor,
    q: Tensor,
    z: Optional[Tensor],
    A: Optional[Tensor],
    D: Optional[Tensor],
    dt_bias: Optional[Tensor],
    rule: str,
    reverse: Sequence[int],
    reduce: str,
    backend: Optional[str],
) -> list[Tensor]:
    """Gradients of the tensors that are there, in the operator's order, of arguments that forward has checked."""
    args = ScanArguments(x, dt, k, q, z, A, D, dt_bias, rule, tuple(map(bool, reverse)), reduce)
    grads = choose(x, backend).backward(dy, args, checkpoints)
    return [grad for grad in grads if grad is not None]


@torch.library.register_fake("vilonghorn::scan_backward")
def _(dy, checkpoints, x, dt, k, q, z, A, D, dt_bias, rule, reverse, reduce, backend):
    inputs = (x, dt, k, q, z, A, D, dt_bias)
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in inputs if t is not None]


_run = differentiate(_scan, _scan_backward)
