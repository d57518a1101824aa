"""The scan in plain torch: the recurrence as it is written, and its adjoint.

`scan_reference` is differentiable and obvious: the oracle of the tests. `forward` and `backward` make a backend of the same steps for any device, with memory that grows by checkpoints
and not by L. Slow by nature: one pass over time in Python.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .validate import ScanArguments

NAME = "reference"
CHUNK = 16  # steps between two saved states: the adjoint keeps at most this many states at once
LANES = 1  # channels of a saved state are padded to a multiple of this
MAX_EXPONENT = 80.0  # exp(80) is finite in float32, and a gate of exp(-80) is zero for every purpose


def unavailable(device_type: str, dtype: torch.dtype = torch.float32) -> str | None:
    """The reference runs wherever torch does."""
    return None


def scan_reference(
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
    reverse: tuple[bool, ...] = (False,),
    reduce: str = "none",
) -> Tensor:
    """Differentiable recurrence; arguments and result as `vilonghorn.ops.scan`, which it defines."""
    args = ScanArguments(x, dt, k, q, z, A, D, dt_bias, rule, tuple(reverse), reduce)
    u, gate, k, q, A, D = prepare(args)
    state = u.new_zeros(*u.shape[:2], u.shape[3], k.shape[3])
    steps = zip(u.unbind(2), gate.unbind(2), k.unbind(2), q.unbind(2))
    outputs = []  # unbind, not u[:, :, t]: the backward of an index writes a whole (G, B, L, D) of zeros a step
    for x_t, gate_t, k_t, q_t in steps:
        state = _step(rule, state, x_t, gate_t, k_t, A)
        outputs.append((state * q_t.unsqueeze(-2)).sum(-1))
    y = torch.stack(outputs, 2) if outputs else torch.zeros_like(u)
    return finish(args, y if D is None else y + D * u).to(x.dtype)


def forward(args: ScanArguments, save: bool) -> tuple[Tensor, Tensor]:
    """Runs the scan without autograd.

    Returns:
        y, and the state before every CHUNK-th step, (G, B, ceil(L / CHUNK), N, D) in one dimension, or an empty tensor
        without `save`.
    """
    u, gate, k, q, A, D = prepare(args)
    state = u.new_zeros(*u.shape[:2], u.shape[3], k.shape[3])
    y = torch.empty_like(u)
    saved = []
    for t in range(u.shape[2]):
        if save and t % CHUNK == 0:
            saved.append(state.mT)
        state = _step(args.rule, state, u[:, :, t], gate[:, :, t], k[:, :, t], A)
        torch.sum(state * q[:, :, t].unsqueeze(-2), -1, out=y[:, :, t])
    if D is not None:
        y += D * u
    checkpoints = torch.stack(saved, 2).flatten() if saved else u.new_empty(0)
    return finish(args, y).to(args.x.dtype).contiguous(), checkpoints


def backward(dy: Tensor, args: ScanArguments, checkpoints: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of x, dt, k, q, z, A, D and dt_bias (None for those absent), by the adjoint recurrence.

    With g the gradient of the state after a step, each step takes g += dy q, reads off the gradients of its own x,
    gate, k and q, and hands g back through the update to the step before. States are made again from the checkpoints.
    """
    u, gate, k, q, A, D = prepare(args)
    G, B, L, width = u.shape
    checkpoints = checkpoints.view(G, B, -(-L // CHUNK), k.shape[3], width)
    dz_scale, dy = _backward_through_finish(dy.to(u.dtype), args)
    grads = {name: torch.empty_like(t) for name, t in dict(u=u, gate=gate, k=k, q=q, y=u).items()}
    dA = torch.zeros_like(A) if A is not None else None
    g = u.new_zeros(G, B, width, k.shape[3])
    for start in reversed(range(0, L, CHUNK)):
        states = [checkpoints[:, :, start // CHUNK].mT]
        stop = min(start + CHUNK, L)
        for t in range(start, stop):
            states.append(_step(args.rule, states[-1], u[:, :, t], gate[:, :, t], k[:, :, t], A))
        for t in reversed(range(start, stop)):
            before, after = states[t - start], states[t - start + 1]
            x_t, e, dy_t = (v[:, :, t].unsqueeze(-1) for v in (u, gate, dy))  # (G, B, D, 1)
            k_t, q_t = (v[:, :, t].unsqueeze(-2) for v in (k, q))  # (G, B, 1, N)
            grads["y"][:, :, t] = (after * q_t).sum(-1)
            grads["q"][:, :, t] = (after * dy_t).sum(-2)
            g = g + dy_t * q_t
            if args.rule == "longhorn":
                predicted = before * k_t  # every state component tries to recall x by itself
                de = (g * k_t * (x_t - predicted)).sum(-1)
                dx = e * (g * k_t).sum(-1, keepdim=True)
                dk = (e * g * (x_t - 2 * predicted)).sum(-2)
                g = g * (1 - e * k_t * k_t)
            elif args.rule == "longhorn_exact":
                error = x_t - (before * k_t).sum(-1, keepdim=True)
                along = (g * k_t).sum(-1, keepdim=True)
                de = (along * error).squeeze(-1)
                dx = e * along
                dk = (g * e * error - before * dx).sum(-2)
                g = g - dx * k_t
            else:
                decay = torch.exp(e * A.unsqueeze(1))
                dlog = g * decay * before
                along = (g * k_t).sum(-1, keepdim=True)
                de = (dlog * A.unsqueeze(1)).sum(-1) + (along * x_t).squeeze(-1)
                dA += (dlog * e).sum(1)
                dx = e * along
                dk = (g * e * x_t).sum(-2)
                g = g * decay
            grads["u"][:, :, t], grads["gate"][:, :, t], grads["k"][:, :, t] = dx.squeeze(-1), de, dk
    ddt, dk_gate = _backward_through_gate(args, gate, k, grads["gate"])
    dx, dk, dq, y = grads["u"], grads["k"] + dk_gate, grads["q"], grads["y"]
    dD = None
    if D is not None:
        dD = (dy * u).sum((1, 2))
        dx, y = dx + D * dy, y + D * u
    dz = None if dz_scale is None else (dz_scale * _time_order(y, args.reverse)).sum(0)
    dx, ddt, dk, dq = (_time_order(t, args.reverse) for t in (dx, ddt, dk, dq))
    dt_bias = None if args.dt_bias is None else ddt.sum((1, 2))
    values = (dx, ddt, dk, dq, dz, dA, dD, dt_bias)
    inputs = (args.x, args.dt, args.k, args.q, args.z, args.A, args.D, args.dt_bias)
    return tuple(None if v is None else v.to(t.dtype).contiguous() for v, t in zip(values, inputs))


def _time_order(t: Tensor, reverse: tuple[bool, ...]) -> Tensor:
    """(G, B, L, ...) with the reverse directions flipped along L; its own inverse."""
    return torch.stack([t_g.flip(1) if flag else t_g for t_g, flag in zip(t.unbind(0), reverse)]) if any(reverse) else t


def prepare(args: ScanArguments) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """x, gate, k, q in each direction's own time order, and A and D, all in the compute dtype."""
    dtype = args.compute_dtype
    x, dt, k, q = (_time_order(t.to(dtype), args.reverse) for t in (args.x, args.dt, args.k, args.q))
    if args.dt_bias is not None:
        dt = dt + args.dt_bias.to(dtype)[:, None, None]
    if args.rule == "mamba":
        gate = F.softplus(dt)
    else:
        # beta / (1 + beta |k|^2) with beta = sigmoid(dt), written so that nothing cancels
        gate = 1 / (1 + k.square().sum(-1, keepdim=True) + torch.exp((-dt).clamp(max=MAX_EXPONENT)))
    A = None if args.A is None else args.A.to(dtype)
    D = None if args.D is None else args.D.to(dtype)[:, None, None]
    return x, gate, k, q, A, D


def _step(rule: str, state: Tensor, x: Tensor, gate: Tensor, k: Tensor, A: Tensor | None) -> Tensor:
    """One token of every direction and sequence: state (G, B, D, N), x and gate (G, B, D), k (G, B, N)."""
    x, gate, k = x.unsqueeze(-1), gate.unsqueeze(-1), k.unsqueeze(-2)
    if rule == "longhorn":
        return state + gate * k * (x - state * k)
    if rule == "longhorn_exact":
        return state + gate * (x - (state * k).sum(-1, keepdim=True)) * k
    return torch.exp(gate * A.unsqueeze(1)) * state + gate * x * k


def finish(args: ScanArguments, y: Tensor) -> Tensor:
    """Back to image order, averaged over directions if asked, and gated by z."""
    y = _time_order(y, args.reverse)
    if args.reduce == "mean":
        y = y.mean(0)
    return y if args.z is None else y * F.silu(args.z.to(y.dtype))


def _backward_through_finish(dy: Tensor, args: ScanArguments) -> tuple[Tensor | None, Tensor]:
    """What multiplies the scan's own y in dz, and dy before the gate, (G, B, L, D) in each direction's time order."""
    G = len(args.reverse)
    if args.reduce == "mean":
        dy = (dy / G).expand(G, *dy.shape)
    if args.z is None:
        return None, _time_order(dy, args.reverse)
    z = args.z.to(dy.dtype)
    sigmoid = torch.sigmoid(z)
    return dy * sigmoid * (1 + z * (1 - sigmoid)), _time_order(dy * z * sigmoid, args.reverse)


def _backward_through_gate(args: ScanArguments, gate: Tensor, k: Tensor, de: Tensor) -> tuple[Tensor, Tensor | float]:
    """Gradient of dt, and the part of k's that comes through |k|^2; in time order."""
    dt = _time_order(args.dt.to(gate.dtype), args.reverse)
    if args.dt_bias is not None:
        dt = dt + args.dt_bias.to(gate.dtype)[:, None, None]
    if args.rule == "mamba":
        return de * torch.sigmoid(dt), 0.0
    squared = gate * gate
    ddt = de * gate * (gate * torch.exp((-dt).clamp(max=MAX_EXPONENT)))
    return ddt, -2 * k * (de * squared).sum(-1, keepdim=True)
