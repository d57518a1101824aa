"""Numbering of tokens and blocks in the maps, and checks of models.

Token 0 is the class token; token 1 + row * columns + column is a patch. The scanned sequence has the class token in its
middle instead ("scan order").
"""

import torch
from torch import Tensor
from torch.nn import Module

from ..layers import prefix_first
from ..models import VisionSSM

CLASS_TOKEN = 0


def check_backbone(model: Module) -> None:
    """Raises TypeError if the model is not of this library, ValueError if it has what the maps do not know."""
    if not isinstance(model, VisionSSM):
        raise TypeError(
            f"the model is a {type(model).__name__}, expected a vilonghorn_*, vilonghornv2_* or vim_* backbone"
        )
    if len({len(block.mixer.reverse) for block in model.blocks}) > 1:
        raise ValueError("the blocks have different numbers of directions; maps need the same number in each")


def check_classifier(model: VisionSSM) -> None:
    """Raises ValueError if the model has no classifier, or one that scores each token."""
    if model.num_classes == 0:
        raise ValueError("the model has no classifier (num_classes is 0), so there is no class to explain")
    if model.global_pool == "":
        raise ValueError("the model scores each token (global_pool is ''), so the image has no score to explain")


def grid_of(model: VisionSSM, images: Tensor) -> tuple[int, int]:
    """Returns rows and columns of patches for images (B, 3, H, W); raises TypeError as `check_backbone`."""
    check_backbone(model)
    return model.patch_embed.dynamic_feat_size(tuple(images.shape[-2:]))


def block_index(model: VisionSSM, block: int) -> int:
    """Converts a block number from 0, or from -1 at the end, to one from 0; raises ValueError if there is none."""
    depth = len(model.blocks)
    if not -depth <= block < depth:
        raise ValueError(f"block is {block}, expected {-depth} to {depth - 1}: the model has {depth} blocks")
    return block % depth


def patch_token(grid: tuple[int, int], row: int, column: int) -> int:
    """Returns the token of a patch; raises ValueError if there is no such patch."""
    if not (0 <= row < grid[0] and 0 <= column < grid[1]):
        raise ValueError(f"patch {row},{column} is not on the image's grid of {grid[0]} rows and {grid[1]} columns")
    return 1 + row * grid[1] + column


def scan_position(token: int, num_patches: int) -> int:
    """Returns the position of a token in scan order; raises ValueError if there is no such token."""
    if not 0 <= token <= num_patches:
        raise ValueError(f"token is {token}, expected 0 (the class token) to {num_patches}")
    return int(from_scan_order(torch.arange(num_patches + 1)[None])[0, token])


def from_scan_order(values: Tensor) -> Tensor:
    """Reorders values of tokens (..., L) from scan order to class token first."""
    return prefix_first(values.flatten(0, -2).unsqueeze(-1)).view_as(values)


def to_map(values: Tensor, grid: tuple[int, int]) -> Tensor:
    """Converts values of tokens (..., 1 + h * w), class token first, to a map of the patches (..., h, w)."""
    return values[..., 1:].unflatten(-1, grid)
