"""The norms of `mamba_ssm.ops.triton`, by `vilonghorn.ops.rms_norm` and torch's layer norm."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import rms_norm
from .selective_scan import check


def layer_norm_fn(
    x, weight, bias, residual=None, *, eps=1e-6, prenorm=False, residual_in_fp32=False, is_rms_norm=False, **others
) -> Tensor | tuple[Tensor, Tensor]:
    """`layer_norm_fn` of `mamba_ssm`, LayerNorm or RMSNorm; what follows `residual` is given by name.

    x is (..., C), weight and bias (C,) or None. `residual`, like x, is added after dropout of x by `dropout_p`;
    `prenorm` returns the sum too, of its dtype, without one of x's, or float32 with `residual_in_fp32`. Returns as x;
    raises NotImplementedError for `others`.
    """
    dropout_p = others.pop("dropout_p", 0.0)
    if given := [name for name, value in others.items() if value is not None and value is not False]:
        raise NotImplementedError(f"layer_norm_fn: {', '.join(given)} is not supported; give none")
    C = x.shape[-1:]
    check("layer_norm_fn", x=(x, x.shape), weight=(weight, C), bias=(bias, C), residual=(residual, x.shape))
    total = (F.dropout(x, dropout_p) if dropout_p else x).to(torch.promote_types(x.dtype, torch.float32))
    total = total if residual is None else total + residual
    weight, bias = weight.to(total.dtype), None if bias is None else bias.to(total.dtype)
    y = rms_norm(total, weight, eps) if is_rms_norm else F.layer_norm(total, C, weight, bias, eps)
    y = y if bias is None or not is_rms_norm else y + bias
    dtype = residual.dtype if residual is not None else total.dtype if residual_in_fp32 else x.dtype
    return (y.to(x.dtype), total.to(dtype)) if prenorm else y.to(x.dtype)


def rms_norm_fn(x, weight, bias, residual=None, **options) -> Tensor | tuple[Tensor, Tensor]:
    """`layer_norm_fn` with is_rms_norm=True."""
    return layer_norm_fn(x, weight, bias, residual, is_rms_norm=True, **options)


class RMSNorm(nn.Module):
    """`mamba_ssm.ops.triton.layer_norm.RMSNorm`."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, dropout_p: float = 0.0, device=None, dtype=None):
        super().__init__()
        self.eps, self.dropout_p = eps, dropout_p
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def forward(self, x: Tensor, residual: Tensor | None = None, prenorm=False, residual_in_fp32=False):
        """As `rms_norm_fn`."""
        options = dict(dropout_p=self.dropout_p if self.training else 0.0, prenorm=prenorm, eps=self.eps)
        return rms_norm_fn(x, self.weight, None, residual, residual_in_fp32=residual_in_fp32, **options)


def rmsnorm_fn(x, weight, bias, z=None, eps=1e-6, group_size=None, norm_before_gate=True) -> Tensor:
    """`rmsnorm_fn` of `layernorm_gated`: rms_norm(x) * silu(z) in groups of channels, else rms_norm(x * silu(z)).

    x and z are (..., C), weight and bias (C,) or None; z may be None. Returns as x.
    """
    C = x.shape[-1:]
    check("rmsnorm_fn", x=(x, x.shape), weight=(weight, C), bias=(bias, C), z=(z, x.shape))
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    gate = 1 if z is None else F.silu(z.to(y.dtype))
    y = (y if norm_before_gate else y * gate).unflatten(-1, (-1, group_size or C[0]))
    y = rms_norm(y, y.new_ones(y.shape[-1]), eps).flatten(-2) * weight + (0 if bias is None else bias)
    return (y * gate if norm_before_gate else y).to(x.dtype)


class GatedRMSNorm(RMSNorm):
    """`mamba_ssm.ops.triton.layernorm_gated.RMSNorm`."""

    def __init__(self, hidden_size, eps=1e-5, group_size=None, norm_before_gate=True, device=None, dtype=None):
        super().__init__(hidden_size, eps, device=device, dtype=dtype)
        self.group_size, self.norm_before_gate = group_size, norm_before_gate

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """As `rmsnorm_fn`."""
        return rmsnorm_fn(x, self.weight, None, z, self.eps, self.group_size, self.norm_before_gate)
