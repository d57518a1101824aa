"""Vim, the controlled baseline: the same trunk with Mamba's state update (Zhu et al., arXiv 2401.09417).

`checkpoint_filter_fn` reads the files of Vim's authors, `to_official` writes them.
"""

from typing import Any

import torch
from timm.models import generate_default_cfgs, register_model
from torch import Tensor

from ..layers import insert_class_token, prefix_first
from .builder import BASE, NANO, PATCH8, SFP, SMALL, STRIDE8, TINY, Model, build_model, default_cfg, icons_cfg
from .fit_weights import fit_state_dict, unwrap
from .pyramid import PyramidSSM
from .trunk import VisionSSM


def _hub(repository: str, file: str, **entries: Any) -> dict[str, Any]:
    """Configuration of weights that Vim's authors publish on the Hugging Face Hub."""
    page = f"https://huggingface.co/{repository}"
    hub = dict(hf_hub_id=repository, hf_hub_filename=file, origin_url=page, paper_ids="arXiv:2401.09417")
    return default_cfg(**hub, **entries)


MAMBA = dict(rule="mamba")
_TINY = ("hustvl/Vim-tiny-midclstok", "vim_t_midclstok_76p1acc.pth")
_TINY_STRIDE8 = ("hustvl/Vim-tiny-midclstok", "vim_t_midclstok_ft_78p3acc.pth")
_SMALL = ("hustvl/Vim-small-midclstok", "vim_s_midclstok_80p5acc.pth")
_BASE = ("hustvl/Vim-base-midclstok", "vim_b_midclstok_81p9acc.pth")
default_cfgs = generate_default_cfgs(
    {
        "vim_nano": default_cfg(),
        "vim_tiny.in1k": _hub(*_TINY),
        "vim_small.in1k": _hub(*_SMALL),
        "vim_base.in1k": _hub(*_BASE),
        "vim_tiny_stride8.in1k": _hub(*_TINY_STRIDE8),
        "vim_nano_patch8.icons480": icons_cfg("vim_nano_patch8"),
        "vim_nano_sfp": default_cfg(**SFP),
        "vim_tiny_sfp.in1k": _hub(*_TINY, **SFP),
        "vim_small_sfp.in1k": _hub(*_SMALL, **SFP),
        "vim_base_sfp.in1k": _hub(*_BASE, **SFP),
    }
)

# Our parameter of both directions, stacked, to the authors' parameters of the forward and the backward direction.
PAIRS = {
    "mixer.A_log": ("mixer.A_log", "mixer.A_b_log"),
    "mixer.D": ("mixer.D", "mixer.D_b"),
    "mixer.conv_weight": ("mixer.conv1d.weight", "mixer.conv1d_b.weight"),  # (D, 1, K) there
    "mixer.conv_bias": ("mixer.conv1d.bias", "mixer.conv1d_b.bias"),
    "mixer.x_proj": ("mixer.x_proj.weight", "mixer.x_proj_b.weight"),
    "mixer.dt_proj": ("mixer.dt_proj.weight", "mixer.dt_proj_b.weight"),
    "mixer.dt_bias": ("mixer.dt_proj.bias", "mixer.dt_proj_b.bias"),
}


def checkpoint_filter_fn(state_dict: dict[str, Tensor], model: VisionSSM) -> dict[str, Tensor]:
    """Fits an official or own Vim checkpoint to a model of another image size, patch size, stride or class count.

    Raises:
        ValueError: values that are not finite, or names or shapes that do not fit.
    """
    state_dict = unwrap(state_dict)
    if "layers.0.mixer.in_proj.weight" in state_dict:
        state_dict = _from_official(state_dict, model)
    return fit_state_dict(state_dict, model)


def to_official(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Converts a state dict to the format of Vim's authors.

    Args:
        state_dict: of a `vim_*` model: rule "mamba", directions (False, True), separate.

    Returns:
        The same values under the authors' names; their files are `{"model": to_official(model.state_dict())}`.

    Raises:
        ValueError: not the state dict of a `vim_*` model.
    """
    has_more = {"blocks.0.mixer.scan_norm", "blocks.0.norm2.weight"} & state_dict.keys()
    stacked, filters = (state_dict.get(f"blocks.0.mixer.{name}", torch.empty(0)) for name in ("A_log", "conv_weight"))
    if len(stacked) != 2 or filters.dim() != 3 or has_more:
        raise ValueError(
            "this state dict is not that of a vim_* model: expected blocks.0.mixer.A_log with two separate directions, "
            "causal convolutions and no MLPs; the official format has nothing else"
        )
    official: dict[str, Tensor] = {}
    for key, value in state_dict.items():
        names = _official_names(key)
        if key == "pos_embed":
            value = insert_class_token(value[:, 1:], value[:, :1])
        elif key.endswith("conv_weight"):
            value = value.unsqueeze(2)
        official.update(zip(names, value if len(names) == 2 else [value]))
    return official


def _from_official(state_dict: dict[str, Tensor], model: VisionSSM) -> dict[str, Tensor]:
    """Inverse of `to_official`. Unknown keys stay, so that the check names them."""
    ours, rest = {}, dict(state_dict)
    for key in model.state_dict():
        names = _official_names(key)
        values = [rest[name] for name in names if name in rest]
        if len(values) < len(names) or values[0].shape != values[-1].shape:
            continue
        value = torch.stack(values) if len(names) == 2 else values[0]
        if key == "pos_embed" and value.dim() == 3:
            value = prefix_first(value)
        elif key.endswith("conv_weight"):
            value = value.squeeze(2)
        ours[key] = value
        for name in names:
            del rest[name]
    return ours | rest


def _official_names(key: str) -> tuple[str, ...]:
    """The authors' names of a parameter: two if it is stacked."""
    if key.startswith("blocks."):
        _, layer, name = key.split(".", 2)
        return tuple(f"layers.{layer}.{official}" for official in PAIRS.get(name, (name,)))
    return ("norm_f.weight" if key == "norm.weight" else key,)


def _build(model_cls: type[Model], variant: str, pretrained: bool, kwargs: dict[str, Any]) -> Model:
    return build_model(model_cls, variant, pretrained, MAMBA | kwargs, checkpoint_filter_fn)


@register_model
def vim_nano(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Mamba nano."""
    return _build(VisionSSM, "vim_nano", pretrained, NANO | kwargs)


@register_model
def vim_tiny(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Mamba tiny."""
    return _build(VisionSSM, "vim_tiny", pretrained, TINY | kwargs)


@register_model
def vim_small(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Mamba small."""
    return _build(VisionSSM, "vim_small", pretrained, SMALL | kwargs)


@register_model
def vim_base(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Mamba base."""
    return _build(VisionSSM, "vim_base", pretrained, BASE | kwargs)


@register_model
def vim_tiny_stride8(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Mamba tiny, overlapping patches (stride=8)."""
    return _build(VisionSSM, "vim_tiny_stride8", pretrained, TINY | STRIDE8 | kwargs)


@register_model
def vim_nano_patch8(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Mamba nano, patches of 8 pixels, average of the patches; embed_dim=92, for Longhorn's parameters."""
    return _build(VisionSSM, "vim_nano_patch8", pretrained, NANO | PATCH8 | dict(embed_dim=92) | kwargs)


@register_model
def vim_nano_sfp(pretrained: bool = False, **kwargs) -> PyramidSSM:
    """Vision Mamba nano, simple feature pyramid."""
    return _build(PyramidSSM, "vim_nano_sfp", pretrained, NANO | dict(pyramid_channels=64) | kwargs)


@register_model
def vim_tiny_sfp(pretrained: bool = False, **kwargs) -> PyramidSSM:
    """Vision Mamba tiny, simple feature pyramid."""
    return _build(PyramidSSM, "vim_tiny_sfp", pretrained, TINY | dict(pyramid_channels=128) | kwargs)


@register_model
def vim_small_sfp(pretrained: bool = False, **kwargs) -> PyramidSSM:
    """Vision Mamba small, simple feature pyramid."""
    return _build(PyramidSSM, "vim_small_sfp", pretrained, SMALL | kwargs)


@register_model
def vim_base_sfp(pretrained: bool = False, **kwargs) -> PyramidSSM:
    """Vision Mamba base, simple feature pyramid."""
    return _build(PyramidSSM, "vim_base_sfp", pretrained, BASE | kwargs)
