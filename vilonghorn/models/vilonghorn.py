"""Vision Longhorn: Vim's trunk with the state updates of Longhorn, an online learner (arXiv 2407.14207).

`vilonghorn_*` has the diagonal update that the paper trains, `vilonghorn_*_exact` the closed form before its diagonal
approximation; everything else is the trunk's.
"""

from __future__ import annotations

from typing import Any, Dict

from timm.models import generate_default_cfgs, register_model
from torch import Tensor

from .factory import SIZES, create, default_cfg
from .trunk import VisionSSM
from .weights import fit_state_dict

default_cfgs = generate_default_cfgs(
    {f"vilonghorn_{size}{form}": default_cfg() for size in SIZES for form in ("", "_exact")}
)


def checkpoint_filter_fn(state_dict: Dict[str, Tensor], model: VisionSSM) -> Dict[str, Tensor]:
    """Fits a Vision Longhorn state dict to a model of another image size, patch size or stride."""
    return fit_state_dict(state_dict, model)


def _create(variant: str, pretrained: bool, **kwargs: Any) -> VisionSSM:
    return create(variant, pretrained, checkpoint_filter_fn, "none are published yet", **kwargs)


@register_model
def vilonghorn_nano(pretrained: bool = False, **kwargs: Any) -> VisionSSM:
    """Vision Longhorn, 96 wide, 6 blocks: for small images and tests."""
    model_args = dict(SIZES["nano"], rule="longhorn")
    return _create("vilonghorn_nano", pretrained, **dict(model_args, **kwargs))


@register_model
def vilonghorn_tiny(pretrained: bool = False, **kwargs: Any) -> VisionSSM:
    """Vision Longhorn, 192 wide, 24 blocks."""
    model_args = dict(SIZES["tiny"], rule="longhorn")
    return _create("vilonghorn_tiny", pretrained, **dict(model_args, **kwargs))


@register_model
def vilonghorn_small(pretrained: bool = False, **kwargs: Any) -> VisionSSM:
    """Vision Longhorn, 384 wide, 24 blocks."""
    model_args = dict(SIZES["small"], rule="longhorn")
    return _create("vilonghorn_small", pretrained, **dict(model_args, **kwargs))


@register_model
def vilonghorn_base(pretrained: bool = False, **kwargs: Any) -> VisionSSM:
    """Vision Longhorn, 768 wide, 24 blocks."""
    model_args = dict(SIZES["base"], rule="longhorn")
    return _create("vilonghorn_base", pretrained, **dict(model_args, **kwargs))


@register_model
def vilonghorn_nano_exact(pretrained: bool = False, **kwargs: Any) -> VisionSSM:
    """Vision Longhorn, 96 wide, 6 blocks: for small images and tests, exact update."""
    model_args = dict(SIZES["nano"], rule="longhorn_exact")
    return _create("vilonghorn_nano_exact", pretrained, **dict(model_args, **kwargs))


@register_model
def vilonghorn_tiny_exact(pretrained: bool = False, **kwargs: Any) -> VisionSSM:
    """Vision Longhorn, 192 wide, 24 blocks, exact update."""
    model_args = dict(SIZES["tiny"], rule="longhorn_exact")
    return _create("vilonghorn_tiny_exact", pretrained, **dict(model_args, **kwargs))


@register_model
def vilonghorn_small_exact(pretrained: bool = False, **kwargs: Any) -> VisionSSM:
    """Vision Longhorn, 384 wide, 24 blocks, exact update."""
    model_args = dict(SIZES["small"], rule="longhorn_exact")
    return _create("vilonghorn_small_exact", pretrained, **dict(model_args, **kwargs))


@register_model
def vilonghorn_base_exact(pretrained: bool = False, **kwargs: Any) -> VisionSSM:
    """Vision Longhorn, 768 wide, 24 blocks, exact update."""
    model_args = dict(SIZES["base"], rule="longhorn_exact")
    return _create("vilonghorn_base_exact", pretrained, **dict(model_args, **kwargs))
