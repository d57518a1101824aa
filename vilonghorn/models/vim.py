"""Vim, the controlled baseline: the same trunk with Mamba's state update (Zhu et al., arXiv 2401.09417).

What the authors' own files look like is this module's affair; they do not load yet.
"""

from __future__ import annotations

from typing import Any, Dict

from timm.models import generate_default_cfgs, register_model
from torch import Tensor

from .factory import SIZES, create, default_cfg
from .trunk import VisionSSM
from .weights import fit_state_dict

# Where the authors publish their weights: Hugging Face Hub repository and file. The tags are ours.
OFFICIAL = {
    "vim_tiny.in1k": ("hustvl/Vim-tiny-midclstok", "vim_t_midclstok_76p1acc.pth"),
    "vim_small.in1k": ("hustvl/Vim-small-midclstok", "vim_s_midclstok_80p5acc.pth"),
    "vim_base.in1k": ("hustvl/Vim-base-midclstok", "vim_b_midclstok_81p9acc.pth"),
}

default_cfgs = generate_default_cfgs(
    {
        "vim_nano": default_cfg(),
        **{
            name: default_cfg(origin_url=f"https://huggingface.co/{repository}", notes=(file,))
            for name, (repository, file) in OFFICIAL.items()
        },
    }
)


def checkpoint_filter_fn(state_dict: Dict[str, Tensor], model: VisionSSM) -> Dict[str, Tensor]:
    """Fits a state dict of ours to a model of another image size, patch size or stride.

    Raises:
        ValueError: a file of Vim's authors, whose keys differ from ours.
    """
    if "layers.0.mixer.A_b_log" in state_dict:
        raise ValueError("these are weights in the format of Vim's authors, which vilonghorn does not read yet")
    return fit_state_dict(state_dict, model)


def _create(variant: str, pretrained: bool, **kwargs: Any) -> VisionSSM:
    return create(variant, pretrained, checkpoint_filter_fn, "the authors' files do not load yet", **kwargs)


@register_model
def vim_nano(pretrained: bool = False, **kwargs: Any) -> VisionSSM:
    """Vim, 96 wide, 6 blocks: for small images and tests."""
    model_args = dict(SIZES["nano"], rule="mamba")
    return _create("vim_nano", pretrained, **dict(model_args, **kwargs))


@register_model
def vim_tiny(pretrained: bool = False, **kwargs: Any) -> VisionSSM:
    """Vim, 192 wide, 24 blocks."""
    model_args = dict(SIZES["tiny"], rule="mamba")
    return _create("vim_tiny", pretrained, **dict(model_args, **kwargs))


@register_model
def vim_small(pretrained: bool = False, **kwargs: Any) -> VisionSSM:
    """Vim, 384 wide, 24 blocks."""
    model_args = dict(SIZES["small"], rule="mamba")
    return _create("vim_small", pretrained, **dict(model_args, **kwargs))


@register_model
def vim_base(pretrained: bool = False, **kwargs: Any) -> VisionSSM:
    """Vim, 768 wide, 24 blocks."""
    model_args = dict(SIZES["base"], rule="mamba")
    return _create("vim_base", pretrained, **dict(model_args, **kwargs))
