"""The scan and what surrounds it: operators on tensors, without modules."""

from .conv import conv_silu
from .dispatch import backends
from .operator import scan

__all__ = ["backends", "conv_silu", "scan"]
