"""Vision Longhorn: Vim's trunk with the state update of Longhorn (Liu et al., arXiv 2407.14207).

`vilonghorn_*` uses the diagonal update that the paper trains, `vilonghorn_*_exact` the closed form before its diagonal
approximation, and `vilonghorn_*_shared` the diagonal update with directions that share their projections.
`*_stride8` has overlapping patches, `*_patch8` patches of 8 pixels, `*_sfp` a feature pyramid. All arguments and their
defaults are in `trunk.py`.
"""

from timm.models import generate_default_cfgs, register_model

from .builder import BASE, NANO, NANO_SFP, PATCH8, SMALL, STRIDE8, TINY, TINY_SFP, build_model, default_cfg, icons_cfg
from .pyramid import PyramidSSM
from .trunk import VisionSSM

EXACT = dict(rule="longhorn_exact")
SHARED = dict(directions="shared")
_FORMS = ("", "_exact", "_shared")
_NAMES = [f"vilonghorn_{size}{form}" for size in ("nano", "tiny", "small", "base") for form in _FORMS]
default_cfgs = generate_default_cfgs(
    {
        **{name: default_cfg() for name in _NAMES},
        **{f"{name}_stride8": default_cfg() for name in _NAMES if "tiny" in name or "small" in name},
        **{f"{name}.icons480": icons_cfg(name) for name in ("vilonghorn_nano_patch8", "vilonghorn_nano_exact_patch8")},
        **{f"{name}_sfp": default_cfg(num_classes=0, fixed_input_size=False) for name in _NAMES},
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
def vilonghorn_base_exact(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn base, exact rule."""
    return build_model(VisionSSM, "vilonghorn_base_exact", pretrained, BASE | EXACT | kwargs)


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
def vilonghorn_base_shared(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn base, shared directions."""
    return build_model(VisionSSM, "vilonghorn_base_shared", pretrained, BASE | SHARED | kwargs)


@register_model
def vilonghorn_tiny_stride8(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn tiny, overlapping patches (stride=8)."""
    return build_model(VisionSSM, "vilonghorn_tiny_stride8", pretrained, TINY | STRIDE8 | kwargs)


@register_model
def vilonghorn_small_stride8(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn small, overlapping patches (stride=8)."""
    return build_model(VisionSSM, "vilonghorn_small_stride8", pretrained, SMALL | STRIDE8 | kwargs)


@register_model
def vilonghorn_tiny_exact_stride8(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn tiny, exact rule, overlapping patches (stride=8)."""
    return build_model(VisionSSM, "vilonghorn_tiny_exact_stride8", pretrained, TINY | EXACT | STRIDE8 | kwargs)


@register_model
def vilonghorn_small_exact_stride8(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn small, exact rule, overlapping patches (stride=8)."""
    return build_model(VisionSSM, "vilonghorn_small_exact_stride8", pretrained, SMALL | EXACT | STRIDE8 | kwargs)


@register_model
def vilonghorn_tiny_shared_stride8(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn tiny, shared directions, overlapping patches (stride=8)."""
    return build_model(VisionSSM, "vilonghorn_tiny_shared_stride8", pretrained, TINY | SHARED | STRIDE8 | kwargs)


@register_model
def vilonghorn_small_shared_stride8(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn small, shared directions, overlapping patches (stride=8)."""
    return build_model(VisionSSM, "vilonghorn_small_shared_stride8", pretrained, SMALL | SHARED | STRIDE8 | kwargs)


@register_model
def vilonghorn_nano_patch8(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn nano, patches of 8 pixels (patch_size=8), average of the patches (global_pool="avg")."""
    return build_model(VisionSSM, "vilonghorn_nano_patch8", pretrained, NANO | PATCH8 | kwargs)


@register_model
def vilonghorn_nano_exact_patch8(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn nano, exact rule, patches of 8 pixels, average of the patches."""
    return build_model(VisionSSM, "vilonghorn_nano_exact_patch8", pretrained, NANO | EXACT | PATCH8 | kwargs)


@register_model
def vilonghorn_nano_sfp(pretrained: bool = False, **kwargs) -> PyramidSSM:
    """Vision Longhorn nano, simple feature pyramid."""
    return build_model(PyramidSSM, "vilonghorn_nano_sfp", pretrained, NANO_SFP | kwargs)


@register_model
def vilonghorn_tiny_sfp(pretrained: bool = False, **kwargs) -> PyramidSSM:
    """Vision Longhorn tiny, simple feature pyramid."""
    return build_model(PyramidSSM, "vilonghorn_tiny_sfp", pretrained, TINY_SFP | kwargs)


@register_model
def vilonghorn_small_sfp(pretrained: bool = False, **kwargs) -> PyramidSSM:
    """Vision Longhorn small, simple feature pyramid."""
    return build_model(PyramidSSM, "vilonghorn_small_sfp", pretrained, SMALL | kwargs)


@register_model
def vilonghorn_base_sfp(pretrained: bool = False, **kwargs) -> PyramidSSM:
    """Vision Longhorn base, simple feature pyramid."""
    return build_model(PyramidSSM, "vilonghorn_base_sfp", pretrained, BASE | kwargs)


@register_model
def vilonghorn_nano_exact_sfp(pretrained: bool = False, **kwargs) -> PyramidSSM:
    """Vision Longhorn nano, exact rule, simple feature pyramid."""
    return build_model(PyramidSSM, "vilonghorn_nano_exact_sfp", pretrained, NANO_SFP | EXACT | kwargs)


@register_model
def vilonghorn_tiny_exact_sfp(pretrained: bool = False, **kwargs) -> PyramidSSM:
    """Vision Longhorn tiny, exact rule, simple feature pyramid."""
    return build_model(PyramidSSM, "vilonghorn_tiny_exact_sfp", pretrained, TINY_SFP | EXACT | kwargs)


@register_model
def vilonghorn_small_exact_sfp(pretrained: bool = False, **kwargs) -> PyramidSSM:
    """Vision Longhorn small, exact rule, simple feature pyramid."""
    return build_model(PyramidSSM, "vilonghorn_small_exact_sfp", pretrained, SMALL | EXACT | kwargs)


@register_model
def vilonghorn_base_exact_sfp(pretrained: bool = False, **kwargs) -> PyramidSSM:
    """Vision Longhorn base, exact rule, simple feature pyramid."""
    return build_model(PyramidSSM, "vilonghorn_base_exact_sfp", pretrained, BASE | EXACT | kwargs)


@register_model
def vilonghorn_nano_shared_sfp(pretrained: bool = False, **kwargs) -> PyramidSSM:
    """Vision Longhorn nano, shared directions, simple feature pyramid."""
    return build_model(PyramidSSM, "vilonghorn_nano_shared_sfp", pretrained, NANO_SFP | SHARED | kwargs)


@register_model
def vilonghorn_tiny_shared_sfp(pretrained: bool = False, **kwargs) -> PyramidSSM:
    """Vision Longhorn tiny, shared directions, simple feature pyramid."""
    return build_model(PyramidSSM, "vilonghorn_tiny_shared_sfp", pretrained, TINY_SFP | SHARED | kwargs)


@register_model
def vilonghorn_small_shared_sfp(pretrained: bool = False, **kwargs) -> PyramidSSM:
    """Vision Longhorn small, shared directions, simple feature pyramid."""
    return build_model(PyramidSSM, "vilonghorn_small_shared_sfp", pretrained, SMALL | SHARED | kwargs)


@register_model
def vilonghorn_base_shared_sfp(pretrained: bool = False, **kwargs) -> PyramidSSM:
    """Vision Longhorn base, shared directions, simple feature pyramid."""
    return build_model(PyramidSSM, "vilonghorn_base_shared_sfp", pretrained, BASE | SHARED | kwargs)
