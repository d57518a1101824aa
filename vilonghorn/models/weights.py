"""Fits a state dict to a model of another image or patch size. What a file's keys mean is each family's own affair."""

from __future__ import annotations

import math
from typing import Dict, Tuple

from timm.layers import resample_abs_pos_embed, resample_patch_embed, to_2tuple
from torch import Tensor

from .trunk import VisionSSM


def fit_state_dict(state_dict: Dict[str, Tensor], model: VisionSSM) -> Dict[str, Tensor]:
    """Resamples patch filters and position rows where the model's grid differs; all else passes unchanged.

    Args:
        state_dict: of a `VisionSSM`, possibly of another image size, patch size or stride.
        model: the model that will load it.

    Returns:
        A new dictionary.

    Raises:
        ValueError: a number of positions whose grid cannot be told.
    """
    fitted = dict(state_dict)
    weight, pos = fitted.get("patch_embed.proj.weight"), fitted.get("pos_embed")
    if pos is not None:
        patch_size = model.patch_embed.patch_size if weight is None else tuple(weight.shape[-2:])
        old_grid = _source_grid(model, patch_size, pos.shape[1] - 1)
        fitted["pos_embed"] = resample_abs_pos_embed(
            pos, new_size=list(model.patch_embed.grid_size), old_size=list(old_grid), verbose=True
        )
    if weight is not None and tuple(weight.shape[-2:]) != model.patch_embed.patch_size:
        fitted["patch_embed.proj.weight"] = resample_patch_embed(weight, list(model.patch_embed.patch_size))
    return fitted


def _source_grid(model: VisionSSM, patch_size: Tuple[int, int], num_patches: int) -> Tuple[int, int]:
    """Grid of a file's position rows: as its configuration says, else the model's own, else square."""
    args = getattr(model, "pretrained_model_args", {})
    cfg = getattr(model, "pretrained_cfg", {})
    size = to_2tuple(args.get("img_size") or cfg.get("input_size", (3, 224, 224))[-2:])
    stride = to_2tuple(args.get("stride") or patch_size)
    side = math.isqrt(num_patches)
    declared = tuple((n - p) // s + 1 for n, p, s in zip(size, patch_size, stride))
    for grid in (declared, model.patch_embed.grid_size, (side, side)):
        if grid[0] * grid[1] == num_patches:
            return grid
    raise ValueError(
        f"pos_embed has rows for {num_patches} patches, neither a square nor the grid of {size[0]}x{size[1]} pixels; "
        "say which image size the weights are of with pretrained_cfg_overlay=dict(input_size=(channels, height, width))"
    )
