"""RMSNorm with the library's operator, which on the CPU saves half of what torch's saves for backward."""

from typing import cast

import torch
from timm.layers import is_exportable, register_notrace_function
from torch import Tensor, nn

from ..ops.norm import rms_norm_exportable


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
        self.exportable = is_exportable()

    def forward(self, x: Tensor) -> Tensor:
        """Normalises x, (..., dim)."""
        if not torch.jit.is_scripting() and self._is_exportable():
            return rms_norm_exportable(x, self.weight, cast(float, self.eps))
        return torch.ops.vilonghorn.rms_norm(x, self.weight, self.eps)

    @torch.jit.unused
    def _is_exportable(self) -> bool:
        return self.exportable or is_exportable()


@register_notrace_function
def to_fp32(x: Tensor) -> Tensor:
    """Converts x to float32, but keeps float64."""
    return x if x.dtype == torch.float64 else x.float()
