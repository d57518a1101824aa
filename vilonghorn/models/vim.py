"""Vim, the controlled baseline: the same trunk with Mamba's state update (Zhu et al., arXiv 2401.09417).

`fit_weights.py` reads the files of Vim's authors.
"""

from typing import Any

from timm.models import generate_default_cfgs, register_model

from .builder import BASE, NANO, PATCH8, SMALL, TINY, build_model, default_cfg, icons_cfg
from .trunk import VisionSSM


def _hub(repository: str, file: str) -> dict[str, Any]:
    """Configuration of weights that Vim's authors publish on the Hugging Face Hub."""
    page = f"https://huggingface.co/{repository}"
    hub = dict(hf_hub_id=repository, hf_hub_filename=file, origin_url=page, paper_ids="arXiv:2401.09417")
    return default_cfg(**hub)


MAMBA = dict(rule="mamba")
default_cfgs = generate_default_cfgs(
    {
        "vim_nano": default_cfg(),
        "vim_tiny.in1k": _hub("hustvl/Vim-tiny-midclstok", "vim_t_midclstok_76p1acc.pth"),
        "vim_small.in1k": _hub("hustvl/Vim-small-midclstok", "vim_s_midclstok_80p5acc.pth"),
        "vim_base.in1k": _hub("hustvl/Vim-base-midclstok", "vim_b_midclstok_81p9acc.pth"),
        "vim_tiny_stride8.in1k": _hub("hustvl/Vim-tiny-midclstok", "vim_t_midclstok_ft_78p3acc.pth"),
        "vim_nano_patch8.icons480": icons_cfg("vim_nano_patch8"),
    }
)


@register_model
def vim_nano(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Mamba nano."""
    return build_model(VisionSSM, "vim_nano", pretrained, MAMBA | NANO | kwargs)


@register_model
def vim_tiny(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Mamba tiny."""
    return build_model(VisionSSM, "vim_tiny", pretrained, MAMBA | TINY | kwargs)


@register_model
def vim_small(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Mamba small."""
    return build_model(VisionSSM, "vim_small", pretrained, MAMBA | SMALL | kwargs)


@register_model
def vim_base(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Mamba base."""
    return build_model(VisionSSM, "vim_base", pretrained, MAMBA | BASE | kwargs)


@register_model
def vim_tiny_stride8(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Mamba tiny, overlapping patches (stride=8)."""
    return build_model(VisionSSM, "vim_tiny_stride8", pretrained, MAMBA | TINY | dict(stride=8) | kwargs)


@register_model
def vim_nano_patch8(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Mamba nano, patches of 8 pixels, average of the patches; embed_dim=92, for Longhorn's parameters."""
    return build_model(VisionSSM, "vim_nano_patch8", pretrained, MAMBA | NANO | PATCH8 | dict(embed_dim=92) | kwargs)
