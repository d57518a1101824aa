"""The layers of a vision state-space model: mixer, residual block, and what turns an image into a token sequence."""

from .block import Block
from .mixer import Mixer
from .norm import RMSNorm, widen
from .tokens import PatchEmbed, insert_class_token, prefix_first

__all__ = ["Block", "Mixer", "PatchEmbed", "RMSNorm", "insert_class_token", "prefix_first", "widen"]
