"""The implicit attention of a mixer's scan, and how long its state retains a token.

For fixed gates and keys every rule is linear in its values: y_t = sum_s M[t, s] x_s + D x_t, with one L x L matrix M
for each direction and channel, triangular in the direction's own time (Ali et al., "The Hidden Attention of Mamba
Models", arXiv 2403.01590). Let T_r be the linear map that token r applies to the state. Every T is symmetric, so
M[t, s] = gate_s (T_{s+1} ... T_t q_t) . k_s: the maps are applied to q_t, from token t back to token s + 1. Positions
are in scan order, with the class token in the middle.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..layers import Mixer
from ..ops.arguments import MambaInnerArguments
from ..ops.mamba_inner import projections
from ..ops.rules import RULES, read
from ..ops.validate import flatten_filter


class ScanInputs(NamedTuple):
    """Inputs of a mixer's scan in the order of the sequence; float32, or float64 if the mixer is."""

    rule: str
    reverse: tuple[bool, ...]
    values: Tensor  # x after the convolution, (G, B, L, D)
    gate: Tensor  # eps of the Longhorn rules, delta of Mamba's, (G, B, L, D)
    k: Tensor  # (G, B, L, N)
    q: Tensor  # (G, B, L, N)
    z: Tensor  # gate of the output, before its SiLU, (B, L, D)
    A: Tensor | None  # rule "mamba": decay rates, (G, D, N), negative
    D: Tensor  # skip weights, (G, D)


@torch.no_grad()
def scan_inputs(mixer: Mixer, tokens: Tensor, grid: Sequence[int] | None = None) -> ScanInputs:
    """Computes the inputs of a mixer's scan from its inputs: normed tokens, (B, L, dim), in scan order, and the grid.

    What the directions share is repeated for each. Raises ValueError for a mixer without a rule.
    """
    if mixer.rule not in RULES:
        raise ValueError(f"the mixer has rule {mixer.rule!r}, expected one with a scan: {', '.join(RULES)}")
    shared, G = mixer.scan_norm is not None, len(mixer.reverse)
    dtype = torch.promote_types(mixer.D.dtype, torch.float32)
    filters, *others = (t if t is None else t.to(dtype) for t in mixer.inner_weights())
    filters, conv_grid = flatten_filter("scan_inputs", filters, grid)
    xz, flags = mixer.in_proj(tokens).to(dtype), [0] if shared else mixer.flags
    args = MambaInnerArguments(xz, filters, *others, mixer.rule, flags, conv_grid)
    z, u, dt, k, q = projections(args)
    dt = (dt + args.dt_bias[:, None, None]).repeat_interleave(u.shape[-1] // dt.shape[-1], -1)
    gate = RULES[mixer.rule].gate(dt, k)
    u, gate, k, q, A, D = (t if t is None else t.expand(G, *t.shape[1:]) for t in (u, gate, k, q, args.A, args.D))
    return ScanInputs(mixer.rule, mixer.reverse, u, gate, k, q, z, A, D)


@torch.no_grad()
def attention_rows(scan: ScanInputs, queries: Sequence[int] | None = None, per_channel: bool = False) -> Tensor:
    """Rows of the matrices M, without the skip D, which adds to their diagonals only.

    Args:
        scan: of `scan_inputs`.
        queries: positions t in the sequence, from 0, without repetition. Default: all L.
        per_channel: keep the rows of every channel instead of the mean of their magnitudes. Only then does the result
            hold L numbers for each query and channel.

    Returns:
        M[t, s] for each query t and every s: (G, B, T, L), or (G, B, T, L, D) with `per_channel`. With these,
        `(rows * values[:, :, None]).sum(3)` plus D times the queries' own values is the scan's y, before the directions
        are averaged (or normed and summed, where they are shared) and gated by z.

    Raises:
        ValueError: a query that is not in the sequence or is given twice.
    """
    G, B, L, width = scan.values.shape
    queries = list(range(L) if queries is None else queries)
    if not set(queries) <= set(range(L)) or len(set(queries)) != len(queries):
        raise ValueError(f"queries are {queries}, expected different positions from 0 to {L - 1}")
    shape = (G, B, len(queries), L)
    rows = scan.values.new_zeros((*shape, width) if per_channel else shape)
    for g in range(G):
        # q of each query after the maps of its earlier tokens; zero until the query's own position is reached.
        carried = scan.gate.new_zeros(B, len(queries), scan.q.shape[-1], width)
        for s, gate, k, q, A in reversed(list(_tokens(scan, g))):
            if s in queries:
                carried[:, queries.index(s)] = q.squeeze(1)
            row = (gate * read(carried, k)).squeeze(2)  # (B, T, D)
            rows[g, :, :, s] = row if per_channel else row.abs().mean(-1)
            carried = RULES[scan.rule].step(carried, 0.0, gate, k, A)
    return rows


@torch.no_grad()
def retention(scan: ScanInputs) -> Tensor:
    """The fraction of each token that is still in the state when a later token is read, averaged over channels.

    Token s adds gate_s x_s k_s to a channel's state. The maps of later tokens shrink it, and with rule "longhorn_exact"
    also rotate it. After token t the fraction |T_t ... T_{s+1} k_s| / |k_s| remains, in the 2-norm over the N numbers
    of a channel's state. It does not depend on the values.

    Returns:
        (G, B, L, L): at [.., t, s] the fraction of token s that remains after token t, in [0, 1]; 1 at t = s, and 0
        where s is after t in the direction's time.
    """
    G, B, L, width = scan.values.shape
    fractions = scan.values.new_zeros(G, B, L, L)
    key_norms = scan.k.norm(dim=-1).clamp_min(torch.finfo(scan.k.dtype).tiny)  # (G, B, L)
    for g in range(G):
        carried = scan.gate.new_zeros(B, L, scan.k.shape[-1], width)
        positions: list[int] = []  # of the tokens in `carried`
        for t, gate, k, _, A in _tokens(scan, g):
            past = len(positions)
            carried[:, :past] = RULES[scan.rule].step(carried[:, :past], 0.0, gate, k, A)
            carried[:, past] = k.squeeze(1)
            positions.append(t)
            remaining = carried[:, : past + 1].norm(dim=-2).mean(-1)
            fractions[g, :, t, positions] = remaining / key_norms[g][:, positions]
    return fractions


def half_life(fractions: Tensor, reverse: Sequence[bool]) -> Tensor:
    """Number of tokens until less than half of a token remains in the state, from the result of `retention`.

    Returns (G, B, L): at least 1; infinite where more than half remains at the end of the sequence.
    """
    half_lives = []
    later = torch.ones(fractions.shape[-2:], dtype=torch.bool, device=fractions.device).tril()  # t >= s
    for fraction, flag in zip(fractions, reverse):
        fraction = fraction.flip(1, 2) if flag else fraction  # (B, t, s) in the direction's own time
        consecutive = ((fraction >= 0.5) | ~later).long().cumprod(1)
        tokens = (consecutive * later).sum(1).to(fractions.dtype).masked_fill(consecutive[:, -1].bool(), torch.inf)
        half_lives.append(tokens.flip(1) if flag else tokens)
    return torch.stack(half_lives)


def _tokens(scan: ScanInputs, g: int) -> Iterator[tuple[int, Tensor, Tensor, Tensor, Tensor | None]]:
    """Position, gate, k, q and A of each token in the direction's own time, as `step` takes them for (B, T, N, D)."""
    positions = range(scan.values.shape[2])
    A = None if scan.A is None else scan.A[g].mT
    for t in reversed(positions) if scan.reverse[g] else positions:
        yield t, scan.gate[g, :, t, None, None], scan.k[g, :, t, None, :, None], scan.q[g, :, t, None, :, None], A
