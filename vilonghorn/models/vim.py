"""Vim, the controlled baseline: the same trunk with Mamba's state update (Zhu et al., arXiv 2401.09417).

`checkpoint_filter_fn` reads the files of Vim's authors, `to_official` writes them.
"""

from typing import Any

import torch
from timm.models import generate_default_cfgs, register_model
from torch import Tensor

from .builder import BASE, NANO, SMALL, TINY, Model, build_model, default_cfg
from .pyramid import PyramidSSM
from .trunk import VisionSSM
from .weights import fit_state_dict, unwrap


def _hub(repository: str, file: str, **entries: Any) -> dict[str, Any]:
    """Configuration of weights that Vim's authors publish on the Hugging Face Hub."""
    hub = dict(
        hf_hub_id=f"hustvl/{repository}",
        hf_hub_filename=file,
        origin_url=f"https://huggingface.co/hustvl/{repository}",
        paper_ids="arXiv:2401.09417",
    )
    return default_cfg(**hub, **entries)


MAMBA = dict(rule="mamba")
_SFP: dict[str, Any] = dict(num_classes=0, fixed_input_size=False)
_TINY = ("Vim-tiny-midclstok", "vim_t_midclstok_76p1acc.pth")
_TINY_STRIDE8 = ("Vim-tiny-midclstok", "vim_t_midclstok_ft_78p3acc.pth")
_SMALL = ("Vim-small-midclstok", "vim_s_midclstok_80p5acc.pth")
_BASE = ("Vim-base-midclstok", "vim_b_midclstok_81p9acc.pth")
default_cfgs = generate_default_cfgs(
    {
        "vim_nano": default_cfg(),
        "vim_tiny.in1k": _hub(*_TINY),
        "vim_small.in1k": _hub(*_SMALL),
        "vim_base.in1k": _hub(*_BASE),
        "vim_tiny_stride8.in1k": _hub(*_TINY_STRIDE8),
        "vim_small_stride8": default_cfg(),
        "vim_nano_sfp": default_cfg(**_SFP),
        "vim_tiny_sfp.in1k": _hub(*_TINY, **_SFP),
        "vim_small_sfp.in1k": _hub(*_SMALL, **_SFP),
        "vim_base_sfp.in1k": _hub(*_BASE, **_SFP),
    }
)

# Our stacked parameter of a mixer to the authors' parameters of the forward and the backward direction.
PAIRS = {
    "A_log": ("A_log", "A_b_log"),
    "D": ("D", "D_b"),
    "conv_weight": ("conv1d.weight", "conv1d_b.weight"),  # (D, 1, K) there
    "conv_bias": ("conv1d.bias", "conv1d_b.bias"),
    "x_proj": ("x_proj.weight", "x_proj_b.weight"),
    "dt_proj": ("dt_proj.weight", "dt_proj_b.weight"),
    "dt_bias": ("dt_proj.bias", "dt_proj_b.bias"),
}


def checkpoint_filter_fn(state_dict: dict[str, Tensor], model: VisionSSM) -> dict[str, Tensor]:
    """Fits an official or own Vim checkpoint to a model of another image size, patch size, stride or class count.

    Raises:
        ValueError: values that are not finite, or names or shapes that do not fit.
    """
    state_dict = unwrap(state_dict)
    return fit_state_dict(
        _from_official(state_dict) if "layers.0.mixer.in_proj.weight" in state_dict else state_dict, model
    )


def to_official(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Converts a state dict to the format of Vim's authors.

    Args:
        state_dict: of a `vim_*` model: rule "mamba", directions (False, True), separate.

    Returns:
        The same values under the authors' names; their files are `{"model": to_official(model.state_dict())}`.

    Raises:
        ValueError: not the state dict of a `vim_*` model.
    """
    stacked = state_dict.get("blocks.0.mixer.A_log")
    if stacked is None or len(stacked) != 2 or "blocks.0.mixer.scan_norm" in state_dict:
        raise ValueError(
            "this state dict is not that of a vim_* model: expected blocks.0.mixer.A_log with two separate directions; "
            "the official format has no other rule"
        )
    official = {}
    for key, value in state_dict.items():
        if key.startswith("blocks."):
            _, layer, name = key.split(".", 2)
            pair = PAIRS.get(name.removeprefix("mixer."))
            if name == "mixer.conv_weight":
                value = value.unsqueeze(2)
            for i, part in enumerate(pair or ()):
                official[f"layers.{layer}.mixer.{part}"] = value[i].contiguous()
            if pair is None:
                official[f"layers.{layer}.{name}"] = value
        elif key == "pos_embed":
            middle = (value.shape[1] - 1) // 2
            official[key] = torch.cat([value[:, 1 : middle + 1], value[:, :1], value[:, middle + 1 :]], 1)
        else:
            official["norm_f.weight" if key == "norm.weight" else key] = value
    return official


def _from_official(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Inverse of `to_official`. Unknown keys stay, so that the check names them."""
    ours, rest = {}, dict(state_dict)
    if "pos_embed" in rest and rest["pos_embed"].dim() == 3:
        pos = rest.pop("pos_embed")
        middle = (pos.shape[1] - 1) // 2
        ours["pos_embed"] = torch.cat([pos[:, middle : middle + 1], pos[:, :middle], pos[:, middle + 1 :]], 1)
    if "norm_f.weight" in rest:
        ours["norm.weight"] = rest.pop("norm_f.weight")
    layers = sorted({key.split(".")[1] for key in rest if key.startswith("layers.")})
    for layer in layers:
        for name, pair in PAIRS.items():
            keys = [f"layers.{layer}.mixer.{part}" for part in pair]
            if all(key in rest for key in keys) and rest[keys[0]].shape == rest[keys[1]].shape:
                stacked = torch.stack([rest.pop(key) for key in keys])
                ours[f"blocks.{layer}.mixer.{name}"] = stacked.squeeze(2) if name == "conv_weight" else stacked
        for name in ("norm.weight", "mixer.in_proj.weight", "mixer.out_proj.weight"):
            if f"layers.{layer}.{name}" in rest:
                ours[f"blocks.{layer}.{name}"] = rest.pop(f"layers.{layer}.{name}")
    return {**ours, **rest}


def _build(model_cls: type[Model], variant: str, pretrained: bool, kwargs: dict[str, Any]) -> Model:
    missing = "Vim's authors publish no file for it"
    return build_model(model_cls, variant, pretrained, checkpoint_filter_fn, missing, kwargs)


@register_model
def vim_nano(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Mamba nano."""
    return _build(VisionSSM, "vim_nano", pretrained, NANO | MAMBA | kwargs)


@register_model
def vim_tiny(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Mamba tiny."""
    return _build(VisionSSM, "vim_tiny", pretrained, TINY | MAMBA | kwargs)


@register_model
def vim_small(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Mamba small."""
    return _build(VisionSSM, "vim_small", pretrained, SMALL | MAMBA | kwargs)


@register_model
def vim_base(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Mamba base."""
    return _build(VisionSSM, "vim_base", pretrained, BASE | MAMBA | kwargs)


@register_model
def vim_tiny_stride8(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Mamba tiny, overlapping patches (stride=8)."""
    return _build(VisionSSM, "vim_tiny_stride8", pretrained, TINY | MAMBA | dict(stride=8) | kwargs)


@register_model
def vim_small_stride8(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Mamba small, overlapping patches (stride=8)."""
    return _build(VisionSSM, "vim_small_stride8", pretrained, SMALL | MAMBA | dict(stride=8) | kwargs)


@register_model
def vim_nano_sfp(pretrained: bool = False, **kwargs) -> PyramidSSM:
    """Vision Mamba nano, simple feature pyramid."""
    return _build(PyramidSSM, "vim_nano_sfp", pretrained, NANO | MAMBA | dict(pyramid_channels=64) | kwargs)


@register_model
def vim_tiny_sfp(pretrained: bool = False, **kwargs) -> PyramidSSM:
    """Vision Mamba tiny, simple feature pyramid."""
    return _build(PyramidSSM, "vim_tiny_sfp", pretrained, TINY | MAMBA | dict(pyramid_channels=128) | kwargs)


@register_model
def vim_small_sfp(pretrained: bool = False, **kwargs) -> PyramidSSM:
    """Vision Mamba small, simple feature pyramid."""
    return _build(PyramidSSM, "vim_small_sfp", pretrained, SMALL | MAMBA | dict(pyramid_channels=256) | kwargs)


@register_model
def vim_base_sfp(pretrained: bool = False, **kwargs) -> PyramidSSM:
    """Vision Mamba base, simple feature pyramid."""
    return _build(PyramidSSM, "vim_base_sfp", pretrained, BASE | MAMBA | dict(pyramid_channels=256) | kwargs)
