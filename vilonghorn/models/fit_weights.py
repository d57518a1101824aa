"""Adapts a checkpoint to a model of another image size, patch size, stride or class count; reads the files of Vim."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from timm.layers import resample_abs_pos_embed, resample_patch_embed, to_2tuple
from timm.models import clean_state_dict
from torch import Tensor

from ..layers import prefix_first
from .hierarchy import HierarchicalSSM
from .trunk import VisionSSM

LONGHORN = ("longhorn", "longhorn_exact")  # rules with the gate of the derivation in `from_mamba`
CHANGES = "of Mamba's rule, B is k, C is q and the step is log(1 / (1 - beta)); A_log is left"
MAX_LISTED = 3  # mismatches that an error names
ADVICE = "give a state dict of float tensors, alone or under 'model' or 'state_dict'"
# Our parameter of both directions, stacked, to the parameters of Vim's authors of the forward and backward direction.
PAIRS = {
    "mixer.A_log": ("mixer.A_log", "mixer.A_b_log"),
    "mixer.D": ("mixer.D", "mixer.D_b"),
    "mixer.conv_weight": ("mixer.conv1d.weight", "mixer.conv1d_b.weight"),  # (D, 1, K) there
    "mixer.conv_bias": ("mixer.conv1d.bias", "mixer.conv1d_b.bias"),
    "mixer.x_proj": ("mixer.x_proj.weight", "mixer.x_proj_b.weight"),
    "mixer.dt_proj": ("mixer.dt_proj.weight", "mixer.dt_proj_b.weight"),
    "mixer.dt_bias": ("mixer.dt_proj.bias", "mixer.dt_proj_b.bias"),
}


def unwrap(checkpoint: dict[str, Any]) -> dict[str, Tensor]:
    """The state dict of a training checkpoint (under "model" or "state_dict"), without wrappers' prefixes ("module.").

    Raises:
        ValueError: another object, or a value that is not a tensor in memory.
    """
    for key in ("model", "state_dict"):
        if isinstance(checkpoint, dict) and isinstance(checkpoint.get(key), dict):
            checkpoint = checkpoint[key]
    if not isinstance(checkpoint, dict) or not all(isinstance(name, str) for name in checkpoint):
        raise ValueError(f"this checkpoint is not a dictionary of tensors by name; {ADVICE}")
    state_dict = clean_state_dict(checkpoint)
    others = [f"{name} is {_form(value)}" for name, value in state_dict.items() if not _is_in_memory(value)]
    if others:
        raise ValueError(f"this checkpoint has values that are not tensors in memory: {_some(others)}; {ADVICE}")
    return state_dict


def _is_in_memory(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta


def _is_float(value: Tensor) -> bool:
    return value.is_floating_point() and value.dtype.itemsize > 1


def _form(value: Any) -> str:
    """The shape of a tensor, with its dtype if that is not a float of 16 bits or more; the type of other objects."""
    if not isinstance(value, Tensor):
        return f"of type {type(value).__name__}"
    return str(tuple(value.shape)) + ("" if _is_float(value) else f" of {value.dtype}")


def checkpoint_filter_fn(
    checkpoint: dict[str, Any], model: VisionSSM | HierarchicalSSM, with_head: bool = True
) -> dict[str, Tensor]:
    """Resamples patch filters and positions where the model's grid differs, and checks all names and shapes.

    timm drops a head of another class count itself, where the model's configuration says that the counts differ.
    Mask tokens that only the checkpoint has are left out; a model keeps its own where the checkpoint has none.
    A model of Longhorn's rules takes weights of Mamba's, as `from_mamba` says.

    Args:
        checkpoint: state dict of a model of this library or of Vim's authors, alone or under "model" or "state_dict".
        model: the model that will load it.
        with_head: whether the model keeps its head; of a feature extractor any head, or none, fits.

    Returns:
        A new dictionary.

    Raises:
        ValueError: values that are not tensors or not finite, names or shapes that do not fit, positions of an unknown
            grid.
    """
    fitted = unwrap(checkpoint)
    if isinstance(model, VisionSSM) and "layers.0.mixer.in_proj.weight" in fitted:
        fitted = _from_official(fitted, model)
    if wrong := [name for name, value in fitted.items() if _is_float(value) and not value.isfinite().all()]:
        raise ValueError(
            f"{len(wrong)} of {len(fitted)} tensors of this checkpoint hold NaN or infinity ({_some(wrong)}); "
            "expected finite weights; take an earlier checkpoint"
        )
    if is_from_mamba(fitted, model):
        fitted = from_mamba(fitted)
    if isinstance(model, VisionSSM):
        fitted = _fit_grid(fitted, model)
    elif "patch_embed.proj.weight" in fitted:
        raise ValueError(
            "this checkpoint has one grid of patches, as those of vilonghorn_*, of vim_*, and of vilonghornv2_* before "
            "it became a hierarchy; the model has stages. Make a model of the first two families, such as "
            "vilonghorn_tiny_exact with the arguments of the checkpoint's blocks"
        )
    if model.mask_token is None:
        fitted.pop("mask_token", None)
    else:
        fitted.setdefault("mask_token", model.mask_token.detach())
    _check_fit(fitted, model, with_head)
    return fitted


def is_from_mamba(state_dict: Mapping[str, Tensor], model: VisionSSM | HierarchicalSSM) -> bool:
    """Whether weights have Mamba's decay rates, in our names or Vim's, and all blocks of a model a rule of Longhorn."""
    if not isinstance(model, VisionSSM):
        return False
    blocks: Any = model.blocks
    return all(b.mixer.rule in LONGHORN for b in blocks) and any(name.endswith("mixer.A_log") for name in state_dict)


def from_mamba(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Drops Mamba's decay rates. All other tensors have the same name, shape and place in Longhorn's rules.

    Derivation, for channel i, state n, u = dt + dt_bias, Mamba's step delta = softplus(u), and x of the token:

        Mamba     s_n <- exp(-delta |A_n|) s_n + delta B_n x,   y = sum C_n s_n
        Longhorn  s_n <- (1 - eps k_n^2) s_n + eps k_n x,       y = sum q_n s_n,   eps = beta / (1 + beta |k|^2)
        The key is what writes x and the query what reads: k = B, q = C.
        beta = sigmoid(u) = 1 - exp(-softplus(u)) = 1 - exp(-delta): the same dt_proj and dt_bias, no constant to fit.
        So eps k_n q_n = delta B_n C_n (1 + O(delta)): what a token adds to the output agrees to first order.
        Forgetting is delta k_n^2 where Mamba has delta |A_n|: training has to learn it, in x_proj.
    """
    return {name: value for name, value in state_dict.items() if not name.endswith("mixer.A_log")}


def _fit_grid(fitted: dict[str, Tensor], model: VisionSSM) -> dict[str, Tensor]:
    """Resamples patch filters and positions."""
    weight, pos = fitted.get("patch_embed.proj.weight"), fitted.get("pos_embed")
    patch_size = model.patch_embed.patch_size
    if weight is not None and _is_float(weight) and weight.dim() == 4 and weight.numel() > 0:
        patch_size = (weight.shape[2], weight.shape[3])
        fitted["patch_embed.proj.weight"] = resample_patch_embed(weight, list(model.patch_embed.patch_size))
    if pos is not None and _is_float(pos) and pos.dim() == 3 and pos.shape[1] > 1:
        old_grid, new_grid = _source_grid(model, patch_size, pos.shape[1] - 1), model.patch_embed.grid_size
        fitted["pos_embed"] = resample_abs_pos_embed(pos, list(new_grid), list(old_grid), num_prefix_tokens=1)
    return fitted


def _check_fit(state_dict: dict[str, Tensor], model: VisionSSM | HierarchicalSSM, with_head: bool) -> None:
    """Checks names, shapes and dtypes against the model's, except what timm adapts: head and input channels."""
    expected = {name: _form(value) for name, value in model.state_dict().items()}
    given = {name: _form(value) for name, value in state_dict.items()}
    cfg, adapted = getattr(model, "pretrained_cfg", {}), set()
    if not with_head or model.num_classes != cfg.get("num_classes", model.num_classes):
        adapted |= {f"{cfg['classifier']}.weight", f"{cfg['classifier']}.bias"}
    if model.in_chans != cfg.get("input_size", (model.in_chans,))[0]:
        adapted.add(f"{cfg['first_conv']}.weight")
    wrong = [
        f"{name} is {given.get(name, 'missing')}, expected {expected.get(name, 'no such name')}"
        for name in expected | given
        if given.get(name) != expected.get(name) and name not in adapted
    ]
    if wrong:
        raise ValueError(
            f"this checkpoint does not fit the model: {len(wrong)} mismatches ({_some(wrong, '; ')}); "
            f"{len(expected.items() & given.items())} of {len(expected)} parameters fit. Make the model with the rule, "
            "sizes and number of classes of the checkpoint"
        )


def _some(items: list[str], separator: str = ", ") -> str:
    return separator.join(items[:MAX_LISTED]) + (f"{separator}..." if len(items) > MAX_LISTED else "")


def _source_grid(model: VisionSSM, patch_size: tuple[int, int], num_patches: int) -> tuple[int, int]:
    """Grid of a checkpoint's positions: from its configuration, else the model's own, else square."""
    args, cfg = getattr(model, "pretrained_model_args", {}), getattr(model, "pretrained_cfg", {})
    size: Any = to_2tuple(args.get("img_size") or cfg.get("input_size", (3, 224, 224))[-2:])
    strides: Any = [to_2tuple(args["stride"])] if args.get("stride") else [model.patch_embed.stride, patch_size]
    declared = [tuple((n - p) // s + 1 for n, p, s in zip(size, patch_size, stride)) for stride in strides]
    side = math.isqrt(num_patches)
    for grid in (*declared, model.patch_embed.grid_size, (side, side)):
        if grid[0] * grid[1] == num_patches:
            return grid
    raise ValueError(
        f"pos_embed has rows for {num_patches} patches, neither a square grid nor that of {size[0]}x{size[1]} pixels; "
        "give the image size of the weights with pretrained_cfg_overlay=dict(input_size=(channels, height, width))"
    )


def _from_official(state_dict: dict[str, Tensor], model: VisionSSM) -> dict[str, Tensor]:
    """Renames the authors' parameters, and stacks those of two directions. What lacks its pair fails the check."""
    ours = {name.replace("layers.", "blocks.").replace("norm_f.", "norm."): t for name, t in state_dict.items()}
    for i in range(len(model.blocks)):
        for name, pair in PAIRS.items():
            values = [ours[official] for part in pair if (official := f"blocks.{i}.{part}") in ours]
            if len(values) == 2 and values[0].shape == values[1].shape:
                for part in pair:
                    del ours[f"blocks.{i}.{part}"]
                stacked = torch.stack(values)
                ours[f"blocks.{i}.{name}"] = stacked.squeeze(2) if name == "mixer.conv_weight" else stacked
    if "pos_embed" in ours and ours["pos_embed"].dim() == 3:
        ours["pos_embed"] = prefix_first(ours["pos_embed"])
    return ours
