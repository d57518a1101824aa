"""RMSNorm with the library's operator, which on the CPU saves half of what torch's saves for backward."""

import torch
from torch import Tensor, nn


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` over the last dimension, of size `dim`, with a weight: the same parameters and arithmetic.

    `eps` is added to the mean square.
    """

    def __init__(self, dim: int, eps: float = 1e-5, device=None, dtype=None) -> None:
        super().__init__(dim, eps=eps, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Normalises x, (..., dim)."""
        return torch.ops.vilonghorn.rms_norm(x, self.weight, self.eps)


def to_fp32(x: Tensor) -> Tensor:
    """Converts x to float32, but keeps float64."""
    return x if x.dtype == torch.float64 else x.float()


def decay_rates(A_log: Tensor) -> Tensor:
    """A of rule "mamba", negative, in float32 or wider."""
    return -torch.exp(to_fp32(A_log))
