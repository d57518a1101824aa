"""The layers of a vision state-space model: mixer, residual block, what turns an image into tokens
and tokens into maps."""

from .block import Block
from .mixer import Mixer
from .norm import RMSNorm, widen
from .pyramid import SimpleFeaturePyramid
from .tokens import PatchEmbed, insert_class_token, padding, prefix_first

__all__ = [
    "Block",
    "Mixer",
    "PatchEmbed",
    "RMSNorm",
    "SimpleFeaturePyramid",
    "insert_class_token",
    "padding",
    "prefix_first",
    "widen",
]
