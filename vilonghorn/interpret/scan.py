"""The scan of one mixer looked into: as the matrix that it is, and as a memory that forgets.

For fixed gates and keys every rule is linear in its values, y_t = sum_s M[t, s] x_s + D x_t with one L x L matrix M for
each direction and channel, triangular in the direction's own time (Ali et al., "The Hidden Attention of Mamba Models",
arXiv 2403.01590). With T_r what the update of token r does to the state, M[t, s] = gate_s (T_{s+1} ... T_t q_t) . k_s,
and every T is symmetric: a row is made by carrying q_t back over the tokens before it. All is in scan order, the class
token in the middle; `interpret_model` puts it on the image.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..layers import Mixer
from ..ops import conv_silu

REDUCTIONS = ("mean", "absolute", "none")
CARRIED = 2**23  # numbers of state carried at a time: more tokens at once means fewer channels at once


class ScanInputs(NamedTuple):
    """What enters a mixer's scan, every direction in the order of the sequence; float32, or float64 if the mixer is."""

    rule: str
    reverse: tuple[bool, ...]
    values: Tensor  # x after the convolution, (G, B, L, D)
    gate: Tensor  # eps of the Longhorn rules, delta of Mamba's, (G, B, L, D)
    k: Tensor  # (G, B, L, N)
    q: Tensor  # (G, B, L, N)
    z: Tensor  # gate of the output, before its SiLU, (B, L, D)
    A: Tensor | None  # rule "mamba": decay rates, (G, D, N), negative; with learned_A (G, B, L, N), of either sign
    D: Tensor  # skip weights, (G, D)


@torch.no_grad()
def scan_inputs(mixer: Mixer, tokens: Tensor) -> ScanInputs:
    """Computes what a mixer's scan is given for a sequence.

    Args:
        mixer: of any form; what directions share is handed out for each of them.
        tokens: what enters the mixer (normed tokens), (B, L, dim), in scan order.
    """
    shared, N, G = mixer.scan_norm is not None, mixer.d_state, len(mixer.reverse)
    dtype = torch.promote_types(mixer.D.dtype, torch.float32)
    weights = {name: p.detach().to(dtype) for name, p in mixer.named_parameters(recurse=False)}
    x, z = mixer.in_proj(tokens).to(dtype).chunk(2, dim=-1)
    u = conv_silu(x, weights["conv_weight"], weights["conv_bias"], reverse=(False,) if shared else mixer.reverse)
    projected = torch.einsum("gbld,gpd->gblp", u, weights["x_proj"])
    low, k, q, rates = projected.split([mixer.dt_rank, N, N, N if mixer.learned_A else 0], dim=-1)
    dt = torch.einsum("gblr,gdr->gbld", low, weights["dt_proj"]) + weights["dt_bias"][:, None, None]
    dt, A = dt.expand_as(u), None  # a scalar beta is one number for all channels
    if mixer.rule == "mamba":
        gate, A = F.softplus(dt), -rates if mixer.learned_A else -weights["A_log"].exp()
    else:
        beta = torch.sigmoid(dt)
        gate = beta / (1 + beta * k.square().sum(-1, keepdim=True))
    u, gate, k, q, A, D = (t if t is None else t.expand(G, *t.shape[1:]) for t in (u, gate, k, q, A, weights["D"]))
    return ScanInputs(mixer.rule, mixer.reverse, u, gate, k, q, z, A, D)


@torch.no_grad()
def attention_rows(scan: ScanInputs, queries: Sequence[int] | None = None, channels: str = "mean") -> Tensor:
    """Rows of the matrices M, without the skip D, which only adds to their diagonals.

    Args:
        scan: of `scan_inputs`.
        queries: positions t in the sequence, from 0, without repetition. Default: all L.
        channels: "mean" averages M over the channels, "absolute" averages its magnitude, "none" keeps every channel:
            only then does the result hold L numbers for each query and channel.

    Returns:
        M[t, s] for each query t and every s: (G, B, T, L), or (G, B, T, L, D) with "none". With rows of every channel,
        `(rows * values[:, :, None]).sum(3)` plus D times the queries' own values is the scan's y, before the directions
        are averaged (or normed and summed, where they are shared) and gated by z.

    Raises:
        ValueError: a query that is not in the sequence or is given twice, or an unknown way with channels.
    """
    if channels not in REDUCTIONS:
        raise ValueError(f"channels is {channels!r}, expected one of {', '.join(map(repr, REDUCTIONS))}")
    G, B, L, width = scan.values.shape
    queries = range(L) if queries is None else queries
    if not set(queries) <= set(range(L)) or len(set(queries)) != len(queries):
        raise ValueError(f"queries are {list(queries)}, expected different positions from 0 to {L - 1}")
    shape = (G, B, len(queries), L)
    rows = scan.values.new_zeros((*shape, width) if channels == "none" else shape)
    for g, part in _slices(scan, len(queries)):
        gate = scan.gate[g, :, :, part]
        latest_first = sorted(range(len(queries)), key=lambda i: queries[i], reverse=not scan.reverse[g])
        carried = gate.new_zeros(B, len(queries), gate.shape[-1], scan.q.shape[-1])
        active = 0  # queries that time, running back, has met: the first ones of `carried`
        for s in _time(L, scan.reverse[g])[::-1]:
            if active < len(queries) and queries[latest_first[active]] == s:
                carried[:, active] = scan.q[g, :, s, None]
                active += 1
            if active == 0:
                continue
            gate_s, k_s = gate[:, s, None], scan.k[g, :, s, None]
            row = gate_s * torch.einsum("btdn,bn->btd", carried[:, :active], scan.k[g, :, s])
            met, column = latest_first[:active], rows[g].select(2, s)  # (B, T) or (B, T, D), a view
            if channels == "none":
                column[:, met, part] = row
            else:
                column[:, met] += (row.abs() if channels == "absolute" else row).sum(-1) / width
            carried[:, :active] = _carry(carried[:, :active], scan.rule, gate_s, k_s, _rates(scan, g, s, part))
    return rows


@torch.no_grad()
def retention(scan: ScanInputs) -> Tensor:
    """How much of what a token wrote is still in the state when a later token is read.

    Token s adds gate_s x_s k_s to a channel's state, and the updates of the tokens after it decay, and with rule
    "longhorn_exact" also turn, what it wrote: after token t its share |T_t ... T_{s+1} k_s| / |k_s| is left, the length
    being that of vectors of N numbers. Of the diagonal rules T is a diagonal of decays, so this is their product. The
    share does not depend on the values, and is averaged over channels.

    Args:
        scan: of `scan_inputs`.

    Returns:
        (G, B, L, L), at [.., t, s] the share in [0, 1] of token s left after token t; 1 at t = s, and 0 for every s
        after t in the direction's time. With learned_A, where nothing keeps a state from growing, it may exceed 1.
    """
    G, B, L, width = scan.values.shape
    kept = scan.values.new_zeros(G, B, L, L)
    written = scan.k.norm(dim=-1).clamp_min(torch.finfo(scan.k.dtype).tiny)  # (G, B, L)
    for g, part in _slices(scan, L):
        gate, order = scan.gate[g, :, :, part], _time(L, scan.reverse[g])
        carried = gate.new_zeros(B, L, gate.shape[-1], scan.k.shape[-1])  # sources in the order of their time
        for now, t in enumerate(order):
            rates = _rates(scan, g, t, part)
            carried[:, :now] = _carry(carried[:, :now], scan.rule, gate[:, t, None], scan.k[g, :, t, None], rates)
            carried[:, now] = scan.k[g, :, t, None]
            sources = order[: now + 1]
            left = carried[:, : now + 1].norm(dim=-1).sum(-1) / width
            kept[g].select(1, t)[:, sources] += left / written[g][:, sources]
    return kept


def half_life(kept: Tensor, reverse: Sequence[bool]) -> Tensor:
    """Tokens until less than half is left of what a token wrote.

    Args:
        kept: of `retention`, (G, B, L, L).
        reverse: a flag for each direction, as the scan's.

    Returns:
        (G, B, L): tokens, at least 1; infinite where more than half is left when the sequence ends.
    """
    L = kept.shape[-1]
    lives = []
    for share, flag in zip(kept, reverse):
        share = share.flip(1, 2) if flag else share  # (B, t, s) in the direction's own time
        later = torch.ones(L, L, dtype=torch.bool, device=share.device).tril()  # t >= s
        found = ((share >= 0.5) & later) | ~later  # half of it, in one reading after the other, or nothing written yet
        consecutive = found.long().cumprod(1)
        life = (consecutive * later).sum(1).to(kept.dtype).masked_fill(consecutive[:, -1].bool(), torch.inf)
        lives.append(life.flip(1) if flag else life)
    return torch.stack(lives)


def _rates(scan: ScanInputs, g: int, token: int, part: slice) -> Tensor | None:
    """Decay rates of a token for a slice of channels, (D, N) or, of every channel the same, (B, 1, 1, N)."""
    if scan.A is None or scan.A.dim() == 3:
        return None if scan.A is None else scan.A[g, part]
    return scan.A[g, :, token, None, None]


def _carry(vectors: Tensor, rule: str, gate: Tensor, k: Tensor, A: Tensor | None) -> Tensor:
    """T of one token applied to vectors (B, T, D, N): gate (B, 1, D), k (B, 1, N), A as `_rates` gives it."""
    gate, k = gate.unsqueeze(-1), k.unsqueeze(-2)
    if rule == "longhorn":
        return vectors * (1 - gate * k * k)
    if rule == "longhorn_exact":
        return vectors - gate * (vectors * k).sum(-1, keepdim=True) * k
    return vectors * torch.exp(gate * A)


def _time(length: int, reverse: bool) -> list[int]:
    """Positions in the order in which a direction reads them."""
    return list(range(length))[::-1] if reverse else list(range(length))


def _slices(scan: ScanInputs, tokens: int) -> Iterator[tuple[int, slice]]:
    """Directions and slices of channels, so that the states of `tokens` tokens are not too many numbers at once."""
    G, B, _, width = scan.values.shape
    step = max(1, CARRIED // max(1, B * tokens * scan.k.shape[-1]))
    for g in range(G):
        for start in range(0, width, step):
            yield g, slice(start, min(start + step, width))
