"""The layers of a vision state-space model: mixer, residual block, patch embedding."""

from ..ops.scan_order import insert_class_token, prefix_first
from .block import Block, Blocks
from .mixer import Mixer
from .norm import RMSNorm, to_fp32
from .patch_embed import PatchEmbed
