"""The scan and what surrounds it: operators on tensors, without modules."""

from . import flops
from .block import block
from .conv import conv_silu
from .dispatch import backends
from .mix import mix
from .norm import rms_norm
from .operator import scan
from .project import project

__all__ = ["backends", "block", "conv_silu", "flops", "mix", "project", "rms_norm", "scan"]
