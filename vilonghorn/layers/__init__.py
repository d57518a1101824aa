"""The layers of a vision state-space model: mixer, residual block, patch embedding."""

from ..ops.scan_order import class_token_first, insert_class_token
from .block import Block, Blocks
from .mixer import Mixer
from .norm import RMSNorm, to_fp32
from .patch_embed import PatchEmbed
