"""The scan of an ablation: Mamba's, with decay rates made of each token instead of constants (in Longhorn's rebuttal
"Mamba with learned A", arXiv 2407.14207).

In plain torch on every device, one pass over time in Python: it is there to be compared with, not to be fast.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .register import differentiate, operator
from .validate import saves

CHUNK = 16  # steps between two saved states


def scan_token_decay(
    x: Tensor, dt: Tensor, k: Tensor, q: Tensor, A: Tensor, *, D: Tensor, dt_bias: Tensor, reverse: Sequence[bool]
) -> Tensor:
    """delta = softplus(dt + dt_bias); s <- exp(-delta_i A_t) s + delta_i x_i k; y_i = s.q + D_i x_i.

    Nothing keeps A_t positive, so a state may grow: so the ablation is defined. States and sums are float32 (float64 for
    float64 inputs).

    Args:
        x: values, (G, B, L, D).
        dt: steps before bias and softplus, (G, B, L, D).
        k: what Mamba calls B, (G, B, L, N).
        q: what Mamba calls C, (G, B, L, N).
        A: rates of decay of each token, (G, B, L, N).
        D: skip weights, (G, D).
        dt_bias: (G, D).
        reverse: a flag for each direction: True scans from the last token to the first.

    Returns:
        y, (G, B, L, D), of x's dtype.
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    u, dt, keys, queries, rates = (_time_order(t.to(compute), reverse) for t in (x, dt, k, q, A))
    delta = F.softplus(dt + dt_bias.to(compute)[:, None, None])
    y, _ = _run(u, delta, rates, keys, queries, saves((u, delta, keys, queries, rates)))
    return _time_order(y + D.to(compute)[:, None, None] * u, reverse).to(x.dtype)


def _time_order(t: Tensor, reverse: Sequence[bool]) -> Tensor:
    """(G, B, L, ...) with the reverse directions flipped along L; its own inverse."""
    return torch.stack([t_g.flip(1) if flag else t_g for t_g, flag in zip(t.unbind(0), reverse)])


def _step(state: Tensor, x: Tensor, delta: Tensor, A: Tensor, k: Tensor) -> Tensor:
    """One token: state (G, B, D, N), x and delta (G, B, D), A and k (G, B, N)."""
    decay = torch.exp(-delta.unsqueeze(-1) * A.unsqueeze(-2))
    return decay * state + (delta * x).unsqueeze(-1) * k.unsqueeze(-2)


@operator("scan_token_decay")
def _scan(x: Tensor, delta: Tensor, A: Tensor, k: Tensor, q: Tensor, save: bool) -> tuple[Tensor, Tensor]:
    """y without skip, and with `save` the state before every CHUNK-th step, in one dimension."""
    state, y, saved = x.new_zeros(*x.shape[:2], x.shape[3], k.shape[3]), torch.empty_like(x), []
    for t in range(x.shape[2]):
        if save and t % CHUNK == 0:
            saved.append(state)
        state = _step(state, x[:, :, t], delta[:, :, t], A[:, :, t], k[:, :, t])
        y[:, :, t] = (state * q[:, :, t].unsqueeze(-2)).sum(-1)
    return y, torch.stack(saved).view(-1) if saved else x.new_empty(0)


@torch.library.register_fake("vilonghorn::scan_token_decay")
def _(x, delta, A, k, q, save):
    G, B, L, D = x.shape
    return torch.empty_like(x), x.new_empty((L + CHUNK - 1) // CHUNK * G * B * D * k.shape[3] if save else 0)


@operator("scan_token_decay_backward")
def _scan_backward(
    dy: Tensor, saved: Tensor, x: Tensor, delta: Tensor, A: Tensor, k: Tensor, q: Tensor
) -> list[Tensor]:
    """Gradients of x, delta, A, k and q, by the adjoint recurrence; states are made again from the saved ones."""
    G, B, L, D = x.shape
    saved = saved.view(-1, G, B, D, k.shape[3])
    dx, ddelta, dA, dk, dq = (torch.empty_like(t) for t in (x, delta, A, k, q))
    g = x.new_zeros(G, B, D, k.shape[3])
    for start in reversed(range(0, L, CHUNK)):
        states, stop = [saved[start // CHUNK]], min(start + CHUNK, L)
        for t in range(start, stop):
            states.append(_step(states[-1], x[:, :, t], delta[:, :, t], A[:, :, t], k[:, :, t]))
        for t in reversed(range(start, stop)):
            before, after = states[t - start], states[t - start + 1]
            x_t, delta_t, dy_t = (v[:, :, t].unsqueeze(-1) for v in (x, delta, dy))  # (G, B, D, 1)
            A_t, k_t, q_t = (v[:, :, t].unsqueeze(-2) for v in (A, k, q))  # (G, B, 1, N)
            dq[:, :, t] = (after * dy_t).sum(-2)
            g = g + dy_t * q_t
            decay = torch.exp(-delta_t * A_t)
            dlog, along = g * decay * before, (g * k_t).sum(-1, keepdim=True)
            dx[:, :, t] = (delta_t * along).squeeze(-1)
            ddelta[:, :, t] = (x_t * along).squeeze(-1) - (dlog * A_t).sum(-1)
            dA[:, :, t] = -(dlog * delta_t).sum(-2)
            dk[:, :, t] = (g * delta_t * x_t).sum(-2)
            g = g * decay
    return [dx, ddelta, dA, dk, dq]


@torch.library.register_fake("vilonghorn::scan_token_decay_backward")
def _(dy, saved, x, delta, A, k, q):
    return [torch.empty_like(t) for t in (x, delta, A, k, q)]


_run = differentiate(_scan, _scan_backward)
