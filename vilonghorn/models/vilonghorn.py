"""Vision Longhorn: Vim's trunk with the state update of Longhorn (Liu et al., arXiv 2407.14207).

`vilonghorn_*` uses the diagonal update that the paper trains, `vilonghorn_*_exact` the closed form before its diagonal
approximation, and `vilonghorn_*_shared` the diagonal update with directions that share their projections.
`*_patch8` has patches of 8 pixels. Keywords give other combinations; all are in `trunk.py`.
"""

from timm.models import generate_default_cfgs, register_model

from .builder import BASE, NANO, PATCH8, SMALL, TINY, build_model, default_cfg, icons_cfg
from .trunk import VisionSSM

EXACT = dict(rule="longhorn_exact")
SHARED = dict(shared_directions=True)
_SIZES = ("nano", "tiny", "small")
_NAMES = [*_SIZES, "base"]
_NAMES += [f"{size}_{suffix}" for size in _SIZES for suffix in ("exact", "shared")]
default_cfgs = generate_default_cfgs(
    {
        **{f"vilonghorn_{name}": default_cfg() for name in _NAMES},
        "vilonghorn_nano_patch8.icons480": icons_cfg("vilonghorn_nano_patch8"),
        "vilonghorn_nano_exact_patch8.icons480": icons_cfg("vilonghorn_nano_exact_patch8"),
    }
)


@register_model
def vilonghorn_nano(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn nano."""
    return build_model(VisionSSM, "vilonghorn_nano", pretrained, NANO | kwargs)


@register_model
def vilonghorn_tiny(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn tiny."""
    return build_model(VisionSSM, "vilonghorn_tiny", pretrained, TINY | kwargs)


@register_model
def vilonghorn_small(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn small."""
    return build_model(VisionSSM, "vilonghorn_small", pretrained, SMALL | kwargs)


@register_model
def vilonghorn_base(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn base."""
    return build_model(VisionSSM, "vilonghorn_base", pretrained, BASE | kwargs)


@register_model
def vilonghorn_nano_exact(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn nano, exact rule."""
    return build_model(VisionSSM, "vilonghorn_nano_exact", pretrained, NANO | EXACT | kwargs)


@register_model
def vilonghorn_tiny_exact(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn tiny, exact rule."""
    return build_model(VisionSSM, "vilonghorn_tiny_exact", pretrained, TINY | EXACT | kwargs)


@register_model
def vilonghorn_small_exact(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn small, exact rule."""
    return build_model(VisionSSM, "vilonghorn_small_exact", pretrained, SMALL | EXACT | kwargs)


@register_model
def vilonghorn_nano_shared(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn nano, shared directions."""
    return build_model(VisionSSM, "vilonghorn_nano_shared", pretrained, NANO | SHARED | kwargs)


@register_model
def vilonghorn_tiny_shared(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn tiny, shared directions."""
    return build_model(VisionSSM, "vilonghorn_tiny_shared", pretrained, TINY | SHARED | kwargs)


@register_model
def vilonghorn_small_shared(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn small, shared directions."""
    return build_model(VisionSSM, "vilonghorn_small_shared", pretrained, SMALL | SHARED | kwargs)


@register_model
def vilonghorn_nano_patch8(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn nano, patches of 8 pixels (patch_size=8), average of the patches (global_pool="avg")."""
    return build_model(VisionSSM, "vilonghorn_nano_patch8", pretrained, NANO | PATCH8 | kwargs)


@register_model
def vilonghorn_nano_exact_patch8(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn nano, exact rule, patches of 8 pixels, average of the patches."""
    return build_model(VisionSSM, "vilonghorn_nano_exact_patch8", pretrained, NANO | EXACT | PATCH8 | kwargs)
