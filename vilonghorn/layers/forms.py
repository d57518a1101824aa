"""What a mixer does between its input and output projections, in every form.

Separate directions are the fused operator's, `vilonghorn.ops.mamba_inner`; shared directions and decays made of each token are
composed here of the smaller operators. For torch.fx all this is one leaf, for TorchScript one operator.
"""

from typing import List, Optional, Sequence

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_function, set_exportable
from torch import Tensor

from ..ops import conv_silu, rms_norm, scan
from ..ops import mamba_inner as mix
from ..ops.token_decay import scan_token_decay

NORM_EPS = 1e-6  # of the norm of each direction


@register_notrace_function  # argument checks read shapes, which a symbolic trace has not
def mix_form(
    xz: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor,
    x_proj: Tensor,
    dt_proj: Tensor,
    dt_bias: Tensor,
    A: Optional[Tensor],
    D: Tensor,
    scan_norm: Optional[Tensor],
    out_proj: Optional[Tensor],
    rule: str,
    reverse: List[bool],
    portable: bool = False,
) -> Tensor:
    """Convolution, projections, scan and gate, with one set of parameters for all directions or one for each.

    Separate: as `vilonghorn.ops.mamba_inner`, the directions averaged. Shared (Longhorn's bidirectional reference):
    u = `conv_silu`(x), causal for every direction; dt, k and q are made of it once; each direction scans them in its own
    order; y = (sum over directions of the normed outputs) * silu(z).

    Args:
        xz: values and gates side by side, (B, L, 2D).
        conv_weight: (S, D, K), S being 1 for shared directions, else their number G; so for all that follow.
        conv_bias: (S, D).
        x_proj: (S, R + 2N, D); with rule "mamba" and no A (S, R + 3N, D), whose last rows make each token's A_t.
        dt_proj: (S, D, R).
        dt_bias: (S, D).
        A: (S, D, N), negative, or None.
        D: (S, D).
        scan_norm: weights of the RMSNorm of each direction, (G, D), for shared directions; None for separate ones.
        out_proj: (dim, D), or None for y itself.
        rule: state update, see `vilonghorn.ops.scan`.
        reverse: a flag for each of the G directions.
        portable: use torch's operators alone, as while timm's switch for export is on; TorchScript has no such form.

    Returns:
        y, (B, L, D), or its projection, (B, L, dim), of xz's dtype (of the autocast dtype under autocast).
    """
    if torch.jit.is_scripting():
        return torch.ops.vilonghorn.mix_form(
            xz, conv_weight, conv_bias, x_proj, dt_proj, dt_bias, A, D, scan_norm, out_proj, rule, reverse
        )
    elif portable:
        with set_exportable(True):
            return _mix_form(
                xz, conv_weight, conv_bias, x_proj, dt_proj, dt_bias, A, D, scan_norm, out_proj, rule, reverse
            )
    else:
        return _mix_form(xz, conv_weight, conv_bias, x_proj, dt_proj, dt_bias, A, D, scan_norm, out_proj, rule, reverse)


def _mix_form(
    xz: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor,
    x_proj: Tensor,
    dt_proj: Tensor,
    dt_bias: Tensor,
    A: Optional[Tensor],
    D: Tensor,
    scan_norm: Optional[Tensor],
    out_proj: Optional[Tensor],
    rule: str,
    reverse: Sequence[bool],
) -> Tensor:
    shared, by_token = scan_norm is not None, rule == "mamba" and A is None
    if not (shared or by_token):
        weights = (conv_weight, conv_bias, x_proj, dt_proj, dt_bias, A, D, out_proj)
        return mix(xz, *weights, rule=rule, reverse=reverse)
    B, L, _ = xz.shape
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
    if shared:
        y = sum(rms_norm(y_g, weight, NORM_EPS) for y_g, weight in zip(y.unbind(0), scan_norm.unbind(0)))
    else:
        y = y.mean(0)
    y = y * F.silu(z)
    return y if out_proj is None else F.linear(y, out_proj.to(y.dtype))


torch.library.define(  # composed of other operators: autograd and compilers see those
    "vilonghorn::mix_form",
    "(Tensor xz, Tensor conv_weight, Tensor conv_bias, Tensor x_proj, Tensor dt_proj, Tensor dt_bias, Tensor? A, Tensor D, "
    "Tensor? scan_norm, Tensor? out_proj, str rule, bool[] reverse) -> Tensor",
)
torch.library.impl("vilonghorn::mix_form", "CompositeImplicitAutograd", _mix_form)
