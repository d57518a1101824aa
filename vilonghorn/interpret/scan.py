"""The implicit attention of a mixer's scan.

For fixed gates and keys every rule is linear in its values: y_t = sum_s M[t, s] x_s + D x_t, with one L x L matrix M
for each direction and channel, triangular in the direction's own time (Ali et al., "The Hidden Attention of Mamba
Models", arXiv 2403.01590). Let T_r be the linear map that token r applies to the state. Every T is symmetric, so
M[t, s] = gate_s (T_{s+1} ... T_t q_t) . k_s: the maps are applied to q_t, from token t back to token s + 1. Positions
are in scan order, with the class token in the middle.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..layers import Mixer
from ..ops.arguments import MambaInnerArguments, MixerWeights
from ..ops.mamba_inner import projections
from ..ops.rules import RULES, read
from ..ops.validate import flatten_weights


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
    weights = MixerWeights(*(None if t is None else t.to(dtype) for t in mixer.weights()))
    weights, conv_grid = flatten_weights("scan_inputs", weights, grid)
    xz, flags = mixer.in_proj(tokens).to(dtype), [0] if shared else mixer.flags
    z, u, dt, k, q = projections(MambaInnerArguments(xz, weights, mixer.rule, flags, conv_grid))
    dt = (dt + weights.dt_bias[:, None, None]).repeat_interleave(u.shape[-1] // dt.shape[-1], -1)
    gate = RULES[mixer.rule].gate(dt, k)
    u, gate, k, q, A, D = (
        t if t is None else t.to(dtype).expand(G, *t.shape[1:]) for t in (u, gate, k, q, weights.A, weights.D)
    )  # autocast has rounded some
    return ScanInputs(mixer.rule, mixer.reverse, u, gate, k, q, z, A, D)


@torch.no_grad()
def attention_rows(scan: ScanInputs, queries: Tensor | None = None, per_channel: bool = False) -> Tensor:
    """Rows of the matrices M, without the skip D, which adds to their diagonals only.

    `queries`, (T, L), are weights of the tokens that read: row t of the result, (G, B, T, L), is the sum of weight
    times row of M. A row of the identity, which is the default, is one token, a row of 1 / L the average of all.

    The result is the mean of the magnitudes of the channels, or with `per_channel` has every channel, (G, B, T, L, D).
    With these and the identity, `(rows * values[:, :, None]).sum(3)` plus D times the values is the scan's y, before
    the directions are averaged (or normed and summed, where they are shared) and gated by z.
    """
    G, B, L, width = scan.values.shape
    weights = torch.eye(L) if queries is None else queries
    weights = weights.to(scan.values)
    shape = (G, B, len(weights), L)
    rows = scan.values.new_zeros((*shape, width) if per_channel else shape)
    for g in range(G):
        # q of the queries' tokens after the maps of earlier tokens; zero until a query's first token is reached.
        carried = scan.gate.new_zeros(B, len(weights), scan.q.shape[-1], width)
        A = None if scan.A is None else scan.A[g].mT
        for s in range(L) if scan.reverse[g] else reversed(range(L)):
            gate, k, q = scan.gate[g, :, s, None, None], scan.k[g, :, s, None, :, None], scan.q[g, :, s, None, :, None]
            carried = carried + weights[:, s, None, None] * q
            row = (gate * read(carried, k)).squeeze(2)  # (B, T, D)
            rows[g, :, :, s] = row if per_channel else row.abs().mean(-1)
            carried = RULES[scan.rule].step(carried, 0.0, gate, k, A)
    return rows
