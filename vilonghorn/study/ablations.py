"""Models for comparison only. Importing this module registers `vim_nano_learned_a`.

Source: "Mamba with learned A" in the rebuttal of Longhorn (arXiv 2407.14207).
"""

from typing import Any

import torch
import torch.nn.functional as F
from timm.models import register_model
from torch import Tensor, nn

from ..layers import Mixer
from ..models import VisionSSM
from ..models.vim import vim_nano
from ..ops import conv_silu, rms_norm, scan
from ..ops.mamba_inner import SCAN_NORM_EPS


class LearnedAMixer(Mixer):
    """A `Mixer` of rule "mamba" with decay rates A_t = W_A x_t of each token instead of constants, in plain torch.

    There is no A_log. The last N rows of x_proj, (S, R + 3N, D), are W_A. A_t may be negative, so a state may grow: the
    source defines it so.
    """

    def __init__(self, dim: int, *, rule: str = "mamba", device=None, dtype=None, **kwargs: Any) -> None:
        """Takes the arguments of `Mixer`, and raises its errors. Another rule than "mamba" is a ValueError."""
        if rule != "mamba":
            raise ValueError(f"rule is {rule!r}, expected 'mamba': the other rules have no A")
        super().__init__(dim, rule=rule, device="meta", dtype=dtype, **kwargs)
        S, rows, D = self.x_proj.shape
        self.x_proj = nn.Parameter(self.x_proj.new_empty(S, rows + self.d_state, D))
        self.A_log = None
        self.to_empty(device=torch.get_default_device() if device is None else device)
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """(B, L, dim) tokens to mixed tokens, same shape."""
        (B, L, _), G, N = x.shape, len(self.reverse), self.d_state
        shared = self.scan_norm is not None
        x, z = self.in_proj(x).chunk(2, dim=-1)
        u = conv_silu(x, self.conv_weight, self.conv_bias, reverse=(False,) if shared else self.reverse)
        projected = torch.bmm(u.flatten(1, 2), self.x_proj.mT.to(u.dtype))
        low, k, q, A = projected.split([self.dt_rank, N, N, N], dim=-1)
        dt = torch.bmm(low, self.dt_proj.mT.to(low.dtype))
        u, dt, k, q, A = (t.reshape(-1, B, L, t.shape[-1]).expand(G, -1, -1, -1) for t in (u, dt, k, q, A))
        D, dt_bias = self.D.expand(G, -1), self.dt_bias.expand(G, -1)
        y = scan(u, dt, k, q, A=-A, D=D, dt_bias=dt_bias, rule="mamba", reverse=self.reverse, backend="reference")
        if shared:
            y = sum(rms_norm(y_g, weight, SCAN_NORM_EPS) for y_g, weight in zip(y.unbind(0), self.scan_norm.unbind(0)))
        else:
            y = y.mean(0)
        return self.out_proj(y * F.silu(z))


@register_model
def vim_nano_learned_a(pretrained: bool = False, **kwargs: Any) -> VisionSSM:
    """`vim_nano` with decay rates computed from each token."""
    return vim_nano(pretrained, mixer_layer=LearnedAMixer, **kwargs)
