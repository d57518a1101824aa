"""Vision Longhorn: Vim's trunk with the state update of Longhorn (Liu et al., arXiv 2407.14207).

`vilonghorn_*` uses the diagonal update that the paper trains, `vilonghorn_*_exact` the closed form before its diagonal
approximation, and `vilonghorn_*_shared` the diagonal update with directions that share their projections.
`*_stride8` has overlapping patches, `*_sfp` a feature pyramid.
"""

from typing import Any

from timm.models import generate_default_cfgs, register_model
from torch import Tensor

from .builder import BASE, NANO, SMALL, TINY, Model, build_model, default_cfg
from .pyramid import PyramidSSM
from .trunk import VisionSSM
from .weights import fit_state_dict


def checkpoint_filter_fn(state_dict: dict[str, Tensor], model: VisionSSM) -> dict[str, Tensor]:
    """Fits a Vision Longhorn checkpoint to a model of another image size, patch size, stride or class count.

    Raises:
        ValueError: values that are not finite, or names or shapes that do not fit.
    """
    return fit_state_dict(state_dict, model)


def _build(model_cls: type[Model], variant: str, pretrained: bool, kwargs: dict[str, Any]) -> Model:
    return build_model(model_cls, variant, pretrained, checkpoint_filter_fn, "none are published yet", kwargs)


EXACT = dict(rule="longhorn_exact")
SHARED = dict(directions="shared")
_FORMS = ("", "_exact", "_shared")
_SIZES = [f"vilonghorn_{size}{form}" for size in ("nano", "tiny", "small", "base") for form in _FORMS]
_STRIDE8 = [f"vilonghorn_{size}{form}_stride8" for size in ("tiny", "small") for form in _FORMS]
_CFGS: dict[str, Any] = {name: default_cfg() for name in _SIZES + _STRIDE8}
_CFGS |= {f"{name}_sfp": default_cfg(num_classes=0, fixed_input_size=False) for name in _SIZES}
default_cfgs = generate_default_cfgs(_CFGS)


@register_model
def vilonghorn_nano(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn nano."""
    return _build(VisionSSM, "vilonghorn_nano", pretrained, NANO | kwargs)


@register_model
def vilonghorn_tiny(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn tiny."""
    return _build(VisionSSM, "vilonghorn_tiny", pretrained, TINY | kwargs)


@register_model
def vilonghorn_small(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn small."""
    return _build(VisionSSM, "vilonghorn_small", pretrained, SMALL | kwargs)


@register_model
def vilonghorn_base(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn base."""
    return _build(VisionSSM, "vilonghorn_base", pretrained, BASE | kwargs)


@register_model
def vilonghorn_nano_exact(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn nano, exact rule."""
    return _build(VisionSSM, "vilonghorn_nano_exact", pretrained, NANO | EXACT | kwargs)


@register_model
def vilonghorn_tiny_exact(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn tiny, exact rule."""
    return _build(VisionSSM, "vilonghorn_tiny_exact", pretrained, TINY | EXACT | kwargs)


@register_model
def vilonghorn_small_exact(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn small, exact rule."""
    return _build(VisionSSM, "vilonghorn_small_exact", pretrained, SMALL | EXACT | kwargs)


@register_model
def vilonghorn_base_exact(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn base, exact rule."""
    return _build(VisionSSM, "vilonghorn_base_exact", pretrained, BASE | EXACT | kwargs)


@register_model
def vilonghorn_nano_shared(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn nano, shared directions."""
    return _build(VisionSSM, "vilonghorn_nano_shared", pretrained, NANO | SHARED | kwargs)


@register_model
def vilonghorn_tiny_shared(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn tiny, shared directions."""
    return _build(VisionSSM, "vilonghorn_tiny_shared", pretrained, TINY | SHARED | kwargs)


@register_model
def vilonghorn_small_shared(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn small, shared directions."""
    return _build(VisionSSM, "vilonghorn_small_shared", pretrained, SMALL | SHARED | kwargs)


@register_model
def vilonghorn_base_shared(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn base, shared directions."""
    return _build(VisionSSM, "vilonghorn_base_shared", pretrained, BASE | SHARED | kwargs)


@register_model
def vilonghorn_tiny_stride8(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn tiny, overlapping patches (stride=8)."""
    return _build(VisionSSM, "vilonghorn_tiny_stride8", pretrained, TINY | dict(stride=8) | kwargs)


@register_model
def vilonghorn_small_stride8(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn small, overlapping patches (stride=8)."""
    return _build(VisionSSM, "vilonghorn_small_stride8", pretrained, SMALL | dict(stride=8) | kwargs)


@register_model
def vilonghorn_tiny_exact_stride8(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn tiny, exact rule, overlapping patches (stride=8)."""
    return _build(VisionSSM, "vilonghorn_tiny_exact_stride8", pretrained, TINY | EXACT | dict(stride=8) | kwargs)


@register_model
def vilonghorn_small_exact_stride8(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn small, exact rule, overlapping patches (stride=8)."""
    return _build(VisionSSM, "vilonghorn_small_exact_stride8", pretrained, SMALL | EXACT | dict(stride=8) | kwargs)


@register_model
def vilonghorn_tiny_shared_stride8(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn tiny, shared directions, overlapping patches (stride=8)."""
    return _build(VisionSSM, "vilonghorn_tiny_shared_stride8", pretrained, TINY | SHARED | dict(stride=8) | kwargs)


@register_model
def vilonghorn_small_shared_stride8(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn small, shared directions, overlapping patches (stride=8)."""
    return _build(VisionSSM, "vilonghorn_small_shared_stride8", pretrained, SMALL | SHARED | dict(stride=8) | kwargs)


@register_model
def vilonghorn_nano_sfp(pretrained: bool = False, **kwargs) -> PyramidSSM:
    """Vision Longhorn nano, simple feature pyramid."""
    return _build(PyramidSSM, "vilonghorn_nano_sfp", pretrained, NANO | dict(pyramid_channels=64) | kwargs)


@register_model
def vilonghorn_tiny_sfp(pretrained: bool = False, **kwargs) -> PyramidSSM:
    """Vision Longhorn tiny, simple feature pyramid."""
    return _build(PyramidSSM, "vilonghorn_tiny_sfp", pretrained, TINY | dict(pyramid_channels=128) | kwargs)


@register_model
def vilonghorn_small_sfp(pretrained: bool = False, **kwargs) -> PyramidSSM:
    """Vision Longhorn small, simple feature pyramid."""
    return _build(PyramidSSM, "vilonghorn_small_sfp", pretrained, SMALL | dict(pyramid_channels=256) | kwargs)


@register_model
def vilonghorn_base_sfp(pretrained: bool = False, **kwargs) -> PyramidSSM:
    """Vision Longhorn base, simple feature pyramid."""
    return _build(PyramidSSM, "vilonghorn_base_sfp", pretrained, BASE | dict(pyramid_channels=256) | kwargs)


@register_model
def vilonghorn_nano_exact_sfp(pretrained: bool = False, **kwargs) -> PyramidSSM:
    """Vision Longhorn nano, exact rule, simple feature pyramid."""
    return _build(
        PyramidSSM,
        "vilonghorn_nano_exact_sfp",
        pretrained,
        NANO | EXACT | dict(pyramid_channels=64) | kwargs,
    )


@register_model
def vilonghorn_tiny_exact_sfp(pretrained: bool = False, **kwargs) -> PyramidSSM:
    """Vision Longhorn tiny, exact rule, simple feature pyramid."""
    return _build(
        PyramidSSM,
        "vilonghorn_tiny_exact_sfp",
        pretrained,
        TINY | EXACT | dict(pyramid_channels=128) | kwargs,
    )


@register_model
def vilonghorn_small_exact_sfp(pretrained: bool = False, **kwargs) -> PyramidSSM:
    """Vision Longhorn small, exact rule, simple feature pyramid."""
    return _build(
        PyramidSSM,
        "vilonghorn_small_exact_sfp",
        pretrained,
        SMALL | EXACT | dict(pyramid_channels=256) | kwargs,
    )


@register_model
def vilonghorn_base_exact_sfp(pretrained: bool = False, **kwargs) -> PyramidSSM:
    """Vision Longhorn base, exact rule, simple feature pyramid."""
    return _build(
        PyramidSSM,
        "vilonghorn_base_exact_sfp",
        pretrained,
        BASE | EXACT | dict(pyramid_channels=256) | kwargs,
    )


@register_model
def vilonghorn_nano_shared_sfp(pretrained: bool = False, **kwargs) -> PyramidSSM:
    """Vision Longhorn nano, shared directions, simple feature pyramid."""
    return _build(
        PyramidSSM,
        "vilonghorn_nano_shared_sfp",
        pretrained,
        NANO | SHARED | dict(pyramid_channels=64) | kwargs,
    )


@register_model
def vilonghorn_tiny_shared_sfp(pretrained: bool = False, **kwargs) -> PyramidSSM:
    """Vision Longhorn tiny, shared directions, simple feature pyramid."""
    return _build(
        PyramidSSM,
        "vilonghorn_tiny_shared_sfp",
        pretrained,
        TINY | SHARED | dict(pyramid_channels=128) | kwargs,
    )


@register_model
def vilonghorn_small_shared_sfp(pretrained: bool = False, **kwargs) -> PyramidSSM:
    """Vision Longhorn small, shared directions, simple feature pyramid."""
    return _build(
        PyramidSSM,
        "vilonghorn_small_shared_sfp",
        pretrained,
        SMALL | SHARED | dict(pyramid_channels=256) | kwargs,
    )


@register_model
def vilonghorn_base_shared_sfp(pretrained: bool = False, **kwargs) -> PyramidSSM:
    """Vision Longhorn base, shared directions, simple feature pyramid."""
    return _build(
        PyramidSSM,
        "vilonghorn_base_shared_sfp",
        pretrained,
        BASE | SHARED | dict(pyramid_channels=256) | kwargs,
    )
