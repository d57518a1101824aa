"""The scan and what surrounds it: operators on tensors, without modules."""

from . import flops
from .backends import backends
from .block import block
from .conv import conv_silu
from .mamba_inner import mamba_inner
from .norm import rms_norm
from .scan import scan

__all__ = ["backends", "block", "conv_silu", "flops", "mamba_inner", "rms_norm", "scan"]
