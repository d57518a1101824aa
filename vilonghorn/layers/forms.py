"""What a mixer does between its projections in the forms that the fused operator does not cover.

Shared directions and decays made of each token, composed of the operators of `vilonghorn.ops`.
"""

from typing import List, Optional, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops import conv_silu, rms_norm, scan
from ..ops.token_decay import scan_token_decay

NORM_EPS = 1e-6  # of the norm of each direction


def mix_forms(
    xz: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor,
    x_proj: Tensor,
    dt_proj: Tensor,
    dt_bias: Tensor,
    A: Optional[Tensor],
    D: Tensor,
    norms: Optional[List[Tensor]] = None,
    *,
    rule: str,
    reverse: Sequence[bool],
) -> Tensor:
    """Convolution, projections, scan and gate, with one set of parameters for all directions or one for each.

    Shared (Longhorn's bidirectional reference): u = `conv_silu`(x), causal for every direction; dt, k and q are made of it
    once; each direction scans them in its own order; y = (sum over directions of the normed outputs) * silu(z). Separate:
    as `vilonghorn.ops.mix`, the directions averaged.

    Args:
        xz: values and gates side by side, (B, L, 2D).
        conv_weight: (S, D, K), S being 1 for shared directions, else their number G; so for all that follow.
        conv_bias: (S, D).
        x_proj: (S, R + 2N, D); without A and with rule "mamba" (S, R + 3N, D), whose last rows make each token's A_t.
        dt_proj: (S, D, R).
        dt_bias: (S, D).
        A: (S, D, N), negative, or None.
        D: (S, D).
        norms: weights of each direction's norm, G times (D,). Default: no norm, and the directions are averaged.
        rule: state update, see `vilonghorn.ops.scan`.
        reverse: a flag for each of the G directions.

    Returns:
        (B, L, D), of xz's dtype (of the autocast dtype under autocast).
    """
    B, L, _ = xz.shape
    shared, by_token = norms is not None, rule == "mamba" and A is None
    R = dt_proj.shape[-1]
    N = (x_proj.shape[1] - R) // (3 if by_token else 2)
    x, z = xz.chunk(2, dim=-1)
    u = conv_silu(x, conv_weight, conv_bias, reverse=(False,) if shared else reverse)  # (S, B, L, D)
    projected = torch.bmm(u.flatten(1, 2), x_proj.mT.to(u.dtype))  # (S, B * L, rows)
    low, k, q, decay = projected.split([R, N, N, N if by_token else 0], dim=-1)
    dt = torch.bmm(low, dt_proj.mT.to(low.dtype))
    dt, k, q, decay = (t.unflatten(1, (B, L)) for t in (dt, k, q, decay))
    G = len(reverse)
    u, dt, k, q, decay = (t.expand(G, -1, -1, -1) for t in (u, dt, k, q, decay))
    D, dt_bias = D.expand(G, -1), dt_bias.expand(G, -1)
    if by_token:
        y = scan_token_decay(u, dt, k, q, decay, D=D, dt_bias=dt_bias, reverse=reverse)
    else:
        A = None if A is None else A.expand(G, -1, -1)
        y = scan(u, dt, k, q, A=A, D=D, dt_bias=dt_bias, rule=rule, reverse=reverse)
    if norms is None:
        y = y.mean(0)
    else:
        y = sum(rms_norm(y_g, weight, NORM_EPS) for y_g, weight in zip(y.unbind(0), norms))
    return y * F.silu(z)
