"""Vim, the controlled baseline: the same trunk with Mamba's state update (Zhu et al., arXiv 2401.09417).

What the files of Vim's authors look like is this module's affair: `checkpoint_filter_fn` reads them, `to_official` writes
them.
"""

from __future__ import annotations

from typing import Dict, Iterator, Tuple

import torch
from torch import Tensor

from . import factory
from .trunk import VisionSSM
from .weights import fit_state_dict, unwrap

MODELS = factory.variants("vim", {"": dict(rule="mamba")})

# Where the authors publish their weights: Hugging Face Hub repository and file. The tags are ours.
OFFICIAL = {
    "vim_tiny.in1k": ("hustvl/Vim-tiny-midclstok", "vim_t_midclstok_76p1acc.pth"),
    "vim_small.in1k": ("hustvl/Vim-small-midclstok", "vim_s_midclstok_80p5acc.pth"),
    "vim_base.in1k": ("hustvl/Vim-base-midclstok", "vim_b_midclstok_81p9acc.pth"),
    "vim_tiny_stride8.in1k": ("hustvl/Vim-tiny-midclstok", "vim_t_midclstok_ft_78p3acc.pth"),
}
default_cfgs = factory.default_cfgs(
    MODELS,
    published={
        tagged: dict(
            hf_hub_id=repository,
            hf_hub_filename=file,
            origin_url=f"https://huggingface.co/{repository}",
            paper_ids="arXiv:2401.09417",
        )
        for tagged, (repository, file) in OFFICIAL.items()
    },
)

# Our stacked parameter of a mixer, and the authors' parameters of its two directions.
PAIRS = {
    "A_log": ("A_log", "A_b_log"),
    "D": ("D", "D_b"),
    "conv_weight": ("conv1d.weight", "conv1d_b.weight"),  # (D, 1, K) there
    "conv_bias": ("conv1d.bias", "conv1d_b.bias"),
    "x_proj": ("x_proj.weight", "x_proj_b.weight"),
    "dt_proj": ("dt_proj.weight", "dt_proj_b.weight"),
    "dt_bias": ("dt_proj.bias", "dt_proj_b.bias"),
}


def checkpoint_filter_fn(state_dict: Dict[str, Tensor], model: VisionSSM) -> Dict[str, Tensor]:
    """Fits a checkpoint, of Vim's authors or of ours, to a model of another image size, patch size, stride or class count.

    Raises:
        ValueError: values that are not finite, or a checkpoint that does not fit; the message names the first mismatches.
    """
    state_dict = unwrap(state_dict)
    return fit_state_dict(
        _from_official(state_dict) if "layers.0.mixer.in_proj.weight" in state_dict else state_dict, model
    )


def to_official(state_dict: Dict[str, Tensor]) -> Dict[str, Tensor]:
    """A Vim of ours in the format of Vim's authors, whose files hold it under "model".

    Args:
        state_dict: of a `vim_*` model: rule "mamba", directions (False, True), separate.

    Returns:
        The same numbers under the authors' names: `torch.save({"model": to_official(model.state_dict())}, path)`.

    Raises:
        ValueError: a state dict that is not a Vim's.
    """
    stacked = state_dict.get("blocks.0.mixer.A_log")
    if stacked is None or len(stacked) != 2 or "blocks.0.mixer.scan_norm" in state_dict:
        raise ValueError(
            "this state dict is not that of a Vim: expected blocks.0.mixer.A_log of two directions, that share nothing; the "
            "format of Vim's authors holds no other rule"
        )
    official = {}
    for key, value in state_dict.items():
        if key.startswith("blocks."):
            layer, name = key.removeprefix("blocks.").split(".", 1)
            parts = _split(name, value)
            official.update({f"layers.{layer}.{part}": tensor for part, tensor in parts})
        elif key == "pos_embed":
            middle = (value.shape[1] - 1) // 2
            official[key] = torch.cat([value[:, 1 : middle + 1], value[:, :1], value[:, middle + 1 :]], 1)
        else:
            official["norm_f.weight" if key == "norm.weight" else key] = value
    return official


def _split(name: str, value: Tensor) -> Iterator[Tuple[str, Tensor]]:
    """Authors' names within a layer, and values, of one parameter of a block."""
    pair = PAIRS.get(name.removeprefix("mixer."))
    if pair is None:
        yield name, value
        return
    for part, tensor in zip(pair, value.unbind(0)):
        yield f"mixer.{part}", (tensor.unsqueeze(1) if name == "mixer.conv_weight" else tensor).contiguous()


def _from_official(state_dict: Dict[str, Tensor]) -> Dict[str, Tensor]:
    """The inverse of `to_official`. Keys that the authors' format does not have stay as they are, to be refused by name."""
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


factory.register(__name__, MODELS, checkpoint_filter_fn, "we know of no file of Vim's authors for it")
