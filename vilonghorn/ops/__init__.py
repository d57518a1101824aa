"""The scan and its companions: they know tensors, no modules."""

from .conv import conv_silu
from .dispatch import backends
from .mix import mix
from .operator import scan

__all__ = ["backends", "conv_silu", "mix", "scan"]
