"""Vision Longhorn v2: the exact rule with other blocks.

A block scans in one direction, forwards and backwards in turn (Adventurer, arXiv 2410.07599). Its convolution is over
the grid of patches (Vision-LSTM v2, arXiv 2406.04303), its inner width is that of the tokens, each of its 4 to 16 heads
has one beta, and a gated MLP follows. The head reads the average of the patches; the class token stays in the sequence.

docs/comparison.md has the accuracy of these switches at nano size. From tiny on there are 8 blocks, twice as wide as
the 24 of `vilonghorn_*`, for as many parameters. Fewer and wider blocks are faster; the page has their accuracy at half
of tiny's width.
"""

from timm.models import generate_default_cfgs, register_model

from .builder import PATCH8, SFP, STRIDE8, build_model, default_cfg, icons_cfg
from .pyramid import PyramidSSM
from .trunk import VisionSSM

V2 = dict(rule="longhorn_exact", num_heads=4, reverse=((False,), (True,)), d_conv=(3, 3))
V2 |= dict(expand=1, global_pool="avg")
NANO = V2 | dict(embed_dim=128, depth=4, mlp_ratio=0.875)
LARGER = V2 | dict(depth=8, mlp_ratio=7 / 12)  # hidden widths are multiples of 32, as tensor cores prefer
TINY = LARGER | dict(embed_dim=384)
SMALL = LARGER | dict(embed_dim=768, num_heads=8)
BASE = LARGER | dict(embed_dim=1536, num_heads=16)
default_cfgs = generate_default_cfgs(
    {
        **{f"vilonghornv2_{name}": default_cfg() for name in ("nano", "tiny", "small", "base", "tiny_stride8")},
        **{f"vilonghornv2_{size}_sfp": default_cfg(**SFP) for size in ("nano", "tiny", "small")},
        "vilonghornv2_nano_patch8.icons480": icons_cfg("vilonghornv2_nano_patch8"),
    }
)


@register_model
def vilonghornv2_nano(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn v2 nano."""
    return build_model(VisionSSM, "vilonghornv2_nano", pretrained, NANO | kwargs)


@register_model
def vilonghornv2_tiny(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn v2 tiny."""
    return build_model(VisionSSM, "vilonghornv2_tiny", pretrained, TINY | kwargs)


@register_model
def vilonghornv2_small(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn v2 small."""
    return build_model(VisionSSM, "vilonghornv2_small", pretrained, SMALL | kwargs)


@register_model
def vilonghornv2_base(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn v2 base."""
    return build_model(VisionSSM, "vilonghornv2_base", pretrained, BASE | kwargs)


@register_model
def vilonghornv2_tiny_stride8(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn v2 tiny, overlapping patches (stride=8)."""
    return build_model(VisionSSM, "vilonghornv2_tiny_stride8", pretrained, TINY | STRIDE8 | kwargs)


@register_model
def vilonghornv2_nano_patch8(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn v2 nano, patches of 8 pixels (patch_size=8)."""
    return build_model(VisionSSM, "vilonghornv2_nano_patch8", pretrained, NANO | PATCH8 | dict(mlp_ratio=1.0) | kwargs)


@register_model
def vilonghornv2_nano_sfp(pretrained: bool = False, **kwargs) -> PyramidSSM:
    """Vision Longhorn v2 nano, simple feature pyramid."""
    return build_model(PyramidSSM, "vilonghornv2_nano_sfp", pretrained, NANO | dict(pyramid_channels=64) | kwargs)


@register_model
def vilonghornv2_tiny_sfp(pretrained: bool = False, **kwargs) -> PyramidSSM:
    """Vision Longhorn v2 tiny, simple feature pyramid."""
    return build_model(PyramidSSM, "vilonghornv2_tiny_sfp", pretrained, TINY | dict(pyramid_channels=128) | kwargs)


@register_model
def vilonghornv2_small_sfp(pretrained: bool = False, **kwargs) -> PyramidSSM:
    """Vision Longhorn v2 small, simple feature pyramid."""
    return build_model(PyramidSSM, "vilonghornv2_small_sfp", pretrained, SMALL | kwargs)
