"""RMSNorm with the library's operator: on the CPU it keeps half of what torch's keeps for backward."""

from timm.layers import is_exportable, register_notrace_function
from torch import Tensor, nn

from ..ops import rms_norm

register_notrace_function(rms_norm)


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
        self.portable = is_exportable()

    def forward(self, x: Tensor) -> Tensor:
        """x of any shape (..., dim), normalised."""
        if self.portable or is_exportable():
            return super().forward(x)
        return rms_norm(x, self.weight, self.eps)
