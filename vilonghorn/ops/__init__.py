"""The scan and what surrounds it: operators on tensors, without modules."""

from . import flops
from .backends import backends
from .block import block
from .conv import conv_silu
from .exportable import decomposed
from .mamba_inner import mamba_inner
from .norm import rms_norm
from .rules import Rule, register_rule
from .scan import scan

__all__ = ["Rule", "backends", "block", "conv_silu", "decomposed", "flops", "mamba_inner", "register_rule", "rms_norm"]
__all__ += ["scan"]
