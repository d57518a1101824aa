"""The layers of a vision state-space model: mixer, residual block, patch embedding, feature pyramid."""

from .block import Block
from .mixer import Mixer
from .norm import RMSNorm, to_fp32
from .patch_embed import PatchEmbed, insert_class_token, prefix_first
from .pyramid import SimpleFeaturePyramid
from .stem import StemEmbed
