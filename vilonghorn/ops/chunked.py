"""The exact rule with one dt for a head, in chunks of tokens: products of matrices, and a loop over chunks only.

Within a chunk, the numbers that the tokens add to the state solve a triangular system (WY form, Yang et al., arXiv
2406.06484), because all channels of a head share keys and eps. Plain torch, differentiated by autograd, for exported
files; `backends/triton/chunks.py` has the kernels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ._torch import captured_loop
from .arguments import ScanArguments
from .rules import RULES
from .scan_order import flip_reversed

CHUNK = 16  # tokens, a power of two


def scan_in_chunks(args: ScanArguments, chunk: int = CHUNK) -> Tensor:
    """`scan` with rule "longhorn_exact" and reduce="none", without z; a captured graph has one loop over the chunks.

    `args` are validated, and autocast is off. `chunk` is a power of two: the result is the same up to rounding, but a
    NaN or an infinity reaches the earlier tokens of its chunk, too. Returns y, (G, B, L, D), of x's dtype; sums are
    float32 (float64 for float64 inputs).
    """
    x, dt, k, q, _, _, D, dt_bias, _, reverse, *_ = args
    (_, _, L, _), H, N, dtype = x.shape, dt.shape[-1], k.shape[-1], x.dtype
    compute = torch.promote_types(dtype, torch.float32)
    skip = 0.0 if D is None else D.to(compute)[:, None, None] * x.to(compute)
    dt = dt.to(compute) if dt_bias is None else dt.to(compute) + dt_bias.to(compute)[:, None, None]
    eps = RULES["longhorn_exact"].gate(dt, k.to(compute))
    x, eps, k, q = (torch.stack(flip_reversed(t.to(compute), reverse)) for t in (x, eps, k, q))
    missing = -L % chunk  # tokens that add nothing fill the last chunk
    missing += 0 if isinstance(L, int) and L else chunk  # for no tokens, one chunk; an exported graph needs two
    x, eps, k, q = (F.pad(t, (0, 0, 0, missing)).unflatten(2, (-1, chunk)) for t in (x, eps, k, q))
    x = x.unflatten(-1, (H, -1)).transpose(3, 4)  # (G, B, chunks, H, C, P)
    k, q, eps = k.unsqueeze(3), q.unsqueeze(3), eps.transpose(3, 4).unsqueeze(-1)
    k_t = k.transpose(-1, -2)  # of k, like q (..., 1, C, N); eps is (..., H, C, 1)
    # Token i adds k_i u_i^T to the state. With S, the state before the chunk, (1 + tril(eps k k^T)) u = eps (x - k S).
    inverse = invert_unit_triangular((eps * (k @ k_t)).tril(-1))
    u, w = inverse @ (eps * x), inverse @ (eps * k)
    seen = (q @ k_t).tril()
    kept = torch.eye(N, dtype=compute, device=x.device) - k_t @ w  # (..., N, N)
    y = seen @ u + (q - seen @ w) @ _states(kept, k_t @ u)
    y = y.transpose(3, 4).flatten(4).flatten(2, 3)[:, :, :L]
    return (torch.stack(flip_reversed(y, reverse)) + skip).to(dtype)


def _states(kept: Tensor, added: Tensor) -> Tensor:
    """The states before each chunk, (G, B, chunks, H, N, P): S <- kept S + added, (..., N, N) and (..., N, P)."""
    state, states = torch.zeros_like(added[:, :, 0]), []
    if torch.compiler.is_compiling() and not isinstance(added.shape[2], int):  # a graph for any number of tokens
        changing = tuple(t.movedim(2, 0).clone(memory_format=torch.contiguous_format) for t in (kept, added))
        return captured_loop(lambda s, chunk: (chunk[0] @ s + chunk[1], s.clone()), state, changing)[1].movedim(0, 2)
    for keep, add in zip(kept.unbind(2), added.unbind(2)):
        states.append(state)
        state = keep @ state + add
    return torch.stack(states, 2)


def invert_unit_triangular(lower: Tensor) -> Tensor:
    """The inverse of 1 + lower, (..., C, C) with C a power of two and zeros from the diagonal on.

    The blocks on the diagonal are inverted, of 1, 2, 4, ... rows: two of them and the block below the first, A, give
    ((X, 0), (-Y A X, Y)). Unlike a power series, this does not overflow.
    """
    C = lower.shape[-1]
    row, column = torch.arange(C, device=lower.device).unsqueeze(1), torch.arange(C, device=lower.device)

    def below(size: int) -> Tensor:
        return lower * ((row // size == column // size + 1) & (row // size % 2 == 1))

    inverse, size = torch.eye(C, dtype=lower.dtype, device=lower.device) - below(1), 2
    while size < C:
        inverse = inverse - inverse @ below(size) @ inverse
        size *= 2
    return inverse
