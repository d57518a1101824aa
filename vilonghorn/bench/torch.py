"""The scan as it is written in plain torch, with what there is to choose from: a loop over tokens, and chunks of them.

These are what the benchmark holds the kernels against. One forward direction; arguments as `vilonghorn.ops.scan` takes
them, without groups. For the equations see `vilonghorn.ops.reference`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 14  # tokens: 14 chunks of 14 at 197 tokens


def torch_loop(x, dt, k, q, z=None, A=None, D=None, dt_bias=None, *, rule: str) -> Tensor:
    """All coefficients first, then a loop over `unbind`. (Indexing `a[:, t]` instead is 20 times slower backward.)"""
    gate = _gate(dt + dt_bias, k, rule)
    state, outputs = x.new_zeros(x.shape[0], x.shape[2], k.shape[-1]), []
    if rule == "longhorn_exact":
        for x_t, gate_t, k_t, q_t in zip(x.unbind(1), gate.unbind(1), k.unbind(1), q.unbind(1)):
            u = gate_t[..., None] * (x_t[..., None] - state @ k_t[..., None])
            state = torch.baddbmm(state, u, k_t[:, None])
            outputs.append((state @ q_t[..., None])[..., 0])
    else:
        decay, update = _coefficients(gate, x, k, A, rule)
        for decay_t, update_t, q_t in zip(decay.unbind(1), update.unbind(1), q.unbind(1)):
            state = torch.addcmul(update_t, decay_t, state)
            outputs.append((state @ q_t[..., None])[..., 0])
    return (torch.stack(outputs, 1) + D * x) * F.silu(z)


def torch_chunked(x, dt, k, q, z=None, A=None, D=None, dt_bias=None, *, rule: str) -> Tensor:
    """Chunks of tokens, so that a loop is short and its tensors are large.

    Diagonal updates run in all chunks at once, as maps of the state before the chunk, which are then chained. The
    exact update goes from chunk to chunk: what it adds to the state solves a triangular system for each channel.
    """
    gate = _gate(dt + dt_bias, k, rule)
    chunked = [_chunks(t) for t in (gate, x, k, q)]  # (B, chunks, CHUNK, ...)
    y = _chunked_exact(*chunked) if rule == "longhorn_exact" else _chunked_diagonal(*chunked, A, rule)
    return (y.flatten(1, 2)[:, : x.shape[1]] + D * x) * F.silu(z)


def _chunked_diagonal(gate: Tensor, x: Tensor, k: Tensor, q: Tensor, A: Tensor | None, rule: str) -> Tensor:
    decay, update = _coefficients(gate, x, k, A, rule)
    scales, states = [torch.ones_like(decay[:, :, 0])], [torch.zeros_like(decay[:, :, 0])]
    for decay_t, update_t in zip(decay.unbind(2), update.unbind(2)):
        scales.append(decay_t * scales[-1])
        states.append(torch.addcmul(update_t, decay_t, states[-1]))
    start, starts = torch.zeros_like(states[0][:, 0]), []
    for scale, state in zip(scales[-1].unbind(1), states[-1].unbind(1)):
        starts.append(start)
        start = torch.addcmul(state, scale, start)
    before = torch.stack(starts, 1)
    after = (torch.addcmul(state, scale, before) for state, scale in zip(states[1:], scales[1:]))
    return torch.stack([(state @ q_t[..., None])[..., 0] for state, q_t in zip(after, q.unbind(2))], 2)


def _chunked_exact(gate: Tensor, x: Tensor, k: Tensor, q: Tensor) -> Tensor:
    keys_meet, queries_meet = (k @ k.mT).tril(-1), (q @ k.mT).tril()  # (B, chunks, CHUNK, CHUNK), for all channels
    state, outputs = x.new_zeros(x.shape[0], x.shape[3], k.shape[-1]), []
    each = (t.unbind(1) for t in (gate.mT, x.mT, k, q, keys_meet, queries_meet))
    for gate_c, x_c, k_c, q_c, keys, queries in zip(*each):
        target = gate_c * (x_c - state @ k_c.mT)
        system = gate_c[..., None] * keys[:, None]  # (B, D, CHUNK, CHUNK), its unit diagonal implied
        added = torch.linalg.solve_triangular(system, target[..., None], upper=False, unitriangular=True)[..., 0]
        outputs.append((state @ q_c.mT + added @ queries.mT).mT)
        state = state + added @ k_c
    return torch.stack(outputs, 1)


def _gate(dt: Tensor, k: Tensor, rule: str) -> Tensor:
    return F.softplus(dt) if rule == "mamba" else 1 / (1 + k.square().sum(-1, keepdim=True) + torch.exp(-dt))


def _coefficients(gate: Tensor, x: Tensor, k: Tensor, A: Tensor | None, rule: str) -> tuple[Tensor, Tensor]:
    """What a diagonal update multiplies the state by, and what it adds, both (..., D, N)."""
    decay = torch.exp(gate[..., None] * A) if rule == "mamba" else 1 - gate[..., None] * k.square()[..., None, :]
    return decay, (gate * x)[..., None] * k[..., None, :]


def _chunks(t: Tensor) -> Tensor:
    """(B, L, ...) as (B, chunks, CHUNK, ...), with zeros at the end, at which no update does anything that is read."""
    return F.pad(t, (0, 0, 0, -t.shape[1] % CHUNK)).unflatten(1, (-1, CHUNK))
