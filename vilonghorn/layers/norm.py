"""RMSNorm with the library's operator, which on the CPU keeps half of what torch's keeps for backward; and the type of sums."""

import torch
import torch.nn.functional as F
from timm.layers import is_exportable, register_notrace_function
from torch import Tensor, nn

from ..ops import rms_norm


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` over the last dimension, with a weight: the same parameters and arithmetic."""

    def __init__(self, dim: int, eps: float = 1e-5, device=None, dtype=None) -> None:
        """
        Args:
            dim: size of the last dimension.
            eps: added to the mean square.
            device: of the weight.
            dtype: of the weight.
        """
        super().__init__(dim, eps=eps, device=device, dtype=dtype)
        self.portable = is_exportable()  # made for export: torch's own

    def forward(self, x: Tensor) -> Tensor:
        """x of any shape (..., dim), normalised."""
        return normed(x, self.weight, self.eps, self.portable)


@register_notrace_function
def normed(x: Tensor, weight: Tensor, eps: float, portable: bool) -> Tensor:
    """x normalised: the operator, or for TorchScript and other runtimes torch's own."""
    if torch.jit.is_scripting() or portable:
        return F.rms_norm(x, weight.shape, weight, eps)
    else:
        return rms_norm(x, weight, eps)


@register_notrace_function
def widen(x: Tensor) -> Tensor:
    """x in the type that sums over depth and time are kept in: float32, or float64 where x is."""
    return x if x.dtype == torch.float64 else x.float()
