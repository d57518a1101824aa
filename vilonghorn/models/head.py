"""The classifier and the pooling by attention of `VisionSSM`."""

from collections.abc import Callable
from functools import partial
from typing import Any

from timm.layers import AttentionPoolLatent, AttentionPoolPrr, trunc_normal_
from torch import nn

ATTN_POOL_HEAD_DIM = 64  # as in timm's vision transformers


def make_attn_pool(
    global_pool: str, embed_dim: int, norm_layer: Callable[..., nn.Module], device=None, dtype=None
) -> nn.Module | None:
    """timm's pooling layer for "map" and "prr"; None for other kinds of pooling."""
    if global_pool not in ("map", "prr"):
        return None
    max_heads = max(1, embed_dim // ATTN_POOL_HEAD_DIM)
    num_heads = max(n for n in range(1, max_heads + 1) if embed_dim % n == 0)
    pool: Any = AttentionPoolLatent if global_pool == "map" else partial(AttentionPoolPrr, pool_type="token")
    return pool(embed_dim, num_heads=num_heads, norm_layer=norm_layer, device=device, dtype=dtype)


def make_classifier(num_features: int, num_classes: int, device=None, dtype=None) -> nn.Module:
    """A linear head, or `nn.Identity` for 0 classes. Raises ValueError for a negative number."""
    if num_classes < 0:
        raise ValueError(f"num_classes is {num_classes}, expected 0 for no classifier, or more")
    head = nn.Linear(num_features, num_classes, device=device, dtype=dtype) if num_classes else nn.Identity()
    init_classifier(head)
    return head


def init_classifier(head: nn.Module) -> None:
    """Initialises a linear head with small weights and zero bias."""
    if isinstance(head, nn.Linear):
        trunc_normal_(head.weight, std=0.02)
        nn.init.zeros_(head.bias)
