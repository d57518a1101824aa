"""`rms_norm`: root-mean-square normalisation that keeps one number a row for backward, where torch's keeps the row again."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from timm.layers import is_exportable
from torch import Tensor

from .backends import cpu as native
from .backends import cpu_mixer as native_mixer
from .register import differentiate, operator
from .validate import DTYPES


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich, arXiv 1910.07467).

    Runs the native kernel on a CPU that has it, else `torch.nn.functional.rms_norm`.

    Args:
        x: (..., C), float32, bfloat16, float16 or float64; sums are float32 (float64 for float64).
        weight: (C,).
        eps: added to the mean square.

    Returns:
        (..., C), of x's dtype.

    Raises:
        ValueError: weight does not have the size of x's last dimension.
    """
    if x.dim() < 1 or weight.shape != x.shape[-1:]:
        raise ValueError(
            f"rms_norm: weight has shape {tuple(weight.shape)}, expected the last dimension of x {tuple(x.shape)}"
        )
    if not is_exportable() and native.unavailable(x.device.type) is None and x.dtype in DTYPES and x.numel() > 0:
        return _run(x, weight, eps)[0]
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)


@operator("rms_norm")
def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y, and the factor of each row."""
    return native_mixer.norm_forward(x, weight, eps)


@torch.library.register_fake("vilonghorn::rms_norm")
def _(x, weight, eps):
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.promote_types(x.dtype, torch.float32))


@operator("rms_norm_backward")
def _rms_norm_backward(dy: Tensor, scale: Tensor, x: Tensor, weight: Tensor) -> list[Tensor]:
    return list(native_mixer.norm_backward(dy, x, weight, scale))


@torch.library.register_fake("vilonghorn::rms_norm_backward")
def _(dy, scale, x, weight):
    return [x.new_empty(x.shape), weight.new_empty(weight.shape)]


_run = differentiate(_rms_norm, _rms_norm_backward)
