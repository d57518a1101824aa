"""Names the arguments of the model that a state dict is of, for errors."""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor


def mismatch_hint(own: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """What to do where the state dict `given` does not fit a model whose state dict is `own`; empty if unknown."""
    arguments = infer_arguments(own)
    other = [f"{name}={value}" for name, value in infer_arguments(given).items() if arguments.get(name) != value]
    if not other:
        return ""
    if other[-1].startswith("img_size"):
        other[-1] += " (if its patches do not overlap)"
    return (
        f"\nThe weights are those of a model with {', '.join(other)}: make this model with these arguments, or let "
        "timm fit a file to another image size, patch size and number of classes, by pretrained=True and "
        "pretrained_cfg_overlay=dict(file=..., num_classes=...)"
    )


def infer_arguments(weights: Mapping[str, Any]) -> dict[str, int]:
    """The arguments of a model that the shapes of its weights tell.

    Args:
        weights: a state dict.

    Returns:
        `num_classes`, `patch_size`, `embed_dim`, `depth`, and `img_size` if images are square and patches do not
        overlap; without those that cannot be told.
    """
    shapes: dict[str, tuple[int, ...]] = {
        name: tuple(value.shape) for name, value in weights.items() if isinstance(value, Tensor)
    }
    found = {}
    if len(head := shapes.get("head.weight", ())) == 2:
        found["num_classes"] = head[0]
    patches, positions = shapes.get("patch_embed.proj.weight", ()), shapes.get("pos_embed", ())
    has_stem = any(name.startswith("patch_embed.backbone.") for name in shapes)
    is_square = len(patches) == 4 and patches[2] == patches[3] and not has_stem
    if is_square:
        found["patch_size"] = patches[2]
    if len(patches) == 4:
        found["embed_dim"] = patches[0]
    if blocks := {name.split(".")[1] for name in shapes if name.startswith("blocks.")}:
        found["depth"] = len(blocks)
    num_patches = positions[1] - 1 if len(positions) == 3 and shapes.get("cls_token", ())[:2] == (1, 1) else 0
    if is_square and num_patches > 0 and math.isqrt(num_patches) ** 2 == num_patches:
        found["img_size"] = math.isqrt(num_patches) * patches[2]
    return found
