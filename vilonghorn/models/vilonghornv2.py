"""Vision Longhorn v2: a hierarchy of gated convolution blocks and of blocks of the exact rule.

Blocks without a recurrence at strides 4 and 8, the exact rule with heads of 64 channels at strides 16 and 32, one
direction a block, forwards and backwards in turn. Nano is for small images: it has strides 4, 8 and 16, and scans from
stride 8 on. docs/comparison.md has the accuracy of these choices at nano size.
"""

from typing import Any

from timm.models import generate_default_cfgs, register_model

from .builder import build_model, default_cfg, icons_cfg
from .hierarchy import HierarchicalSSM

NANO: dict[str, Any] = dict(img_size=64, embed_dims=(48, 96, 160), depths=(2, 2, 2), num_conv_stages=1)
NANO |= dict(num_heads=(None, 4, 4), mlp_ratios=(0.0, 0.5, 0.5))
SMALL = dict(embed_dims=(80, 160, 512, 1024), depths=(3, 3, 5, 2), num_heads=(None, None, 8, 16))
BASE = dict(embed_dims=(128, 256, 768, 1536), depths=(3, 4, 10, 3), num_heads=(None, None, 12, 24))
_CFG = dict(pool_size=(7, 7), fixed_input_size=False, first_conv="stem.conv1", classifier="head.fc")
default_cfgs = generate_default_cfgs(
    {
        "vilonghornv2_nano.icons480": icons_cfg("vilonghornv2_nano", **_CFG | dict(pool_size=(4, 4))),
        **{f"vilonghornv2_{size}": default_cfg(**_CFG) for size in ("tiny", "small", "base")},
    }
)


@register_model
def vilonghornv2_nano(pretrained: bool = False, **kwargs) -> HierarchicalSSM:
    """Vision Longhorn v2 nano."""
    return build_model(HierarchicalSSM, "vilonghornv2_nano", pretrained, NANO | kwargs)


@register_model
def vilonghornv2_tiny(pretrained: bool = False, **kwargs) -> HierarchicalSSM:
    """Vision Longhorn v2 tiny."""
    return build_model(HierarchicalSSM, "vilonghornv2_tiny", pretrained, kwargs)


@register_model
def vilonghornv2_small(pretrained: bool = False, **kwargs) -> HierarchicalSSM:
    """Vision Longhorn v2 small."""
    return build_model(HierarchicalSSM, "vilonghornv2_small", pretrained, SMALL | kwargs)


@register_model
def vilonghornv2_base(pretrained: bool = False, **kwargs) -> HierarchicalSSM:
    """Vision Longhorn v2 base."""
    return build_model(HierarchicalSSM, "vilonghornv2_base", pretrained, BASE | kwargs)
