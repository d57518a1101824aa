"""How the maps count: tokens prefix first, as outside the blocks, and where each stands in the scanned sequence.

Token 0 is the class token, token 1 + row * columns + column a patch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Module

from ..layers import prefix_first
from ..models import VisionSSM

CLASS_TOKEN = 0


def check_backbone(model: Module) -> None:
    """Refuses models without this library's blocks.

    Raises:
        TypeError: a model of another kind.
    """
    if not isinstance(model, VisionSSM):
        raise TypeError(f"the model is a {type(model).__name__}, expected a vilonghorn_* or vim_* backbone")


def check_classifier(model: VisionSSM) -> None:
    """Refuses models whose outputs are no scores of classes.

    Raises:
        ValueError: a model without a classifier.
    """
    if model.num_classes == 0:
        raise ValueError(
            "the model has no classifier (num_classes is 0), so that there is no class to explain; make it with some"
        )


def grid_of(model: VisionSSM, images: Tensor) -> tuple[int, int]:
    """Rows and columns of patches of images (B, 3, H, W).

    Raises:
        TypeError: a model of another kind.
    """
    check_backbone(model)
    return model.patch_embed.dynamic_feat_size(tuple(images.shape[-2:]))


def block_index(model: VisionSSM, block: int) -> int:
    """A block's number from 0.

    Raises:
        ValueError: there is no such block.
    """
    depth = len(model.blocks)
    if not -depth <= block < depth:
        raise ValueError(f"block is {block}, expected {-depth} to {depth - 1}: the model has {depth} blocks")
    return block % depth


def patch_token(grid: tuple[int, int], row: int, column: int) -> int:
    """The token of a patch.

    Raises:
        ValueError: there is no such patch.
    """
    if not (0 <= row < grid[0] and 0 <= column < grid[1]):
        raise ValueError(f"patch {row},{column} is not on the image's grid of {grid[0]} rows and {grid[1]} columns")
    return 1 + row * grid[1] + column


def to_map(tokens: Tensor, grid: tuple[int, int]) -> Tensor:
    """Numbers of tokens, prefix first, (..., 1 + h * w), to those of the patches, (..., h, w)."""
    return tokens[..., 1:].unflatten(-1, grid)


def scan_position(token: int, patches: int) -> int:
    """Where a token, counted prefix first, stands in the sequence that is scanned.

    Raises:
        ValueError: there is no such token.
    """
    if not 0 <= token <= patches:
        raise ValueError(f"token is {token}, expected 0 (the class token) to {patches}")
    order = prefix_first(torch.arange(patches + 1).view(1, -1, 1))
    return int(order[0, token, 0])
