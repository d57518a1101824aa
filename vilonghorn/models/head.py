"""From tokens to logits: pooling, dropout, and a classifier that can be replaced."""

from typing import Optional

from timm.layers import AttentionPoolLatent, AttentionPoolPrr, get_device_dtype, global_pool_nlc, trunc_normal_
from torch import Tensor, nn

POOLS = ("token", "avg", "avgmax", "max", "map", "prr", "")
HEAD_DIM = 64  # of the attention in "map" and "prr", as in timm's vision transformers


class ClassifierHead:
    """Mixin of `VisionSSM`: pooling and classifier, as timm's VisionTransformer has them."""

    def _build_head(self, global_pool: str, drop_rate: float, num_classes: int, norm_layer, **dd) -> None:
        """Makes what `forward_head` needs of the model's embed_dim.

        Raises:
            ValueError: an unknown pooling.
        """
        _check_pool(global_pool)
        self.num_classes, self.global_pool = num_classes, global_pool
        heads = max(n for n in range(1, max(1, self.embed_dim // HEAD_DIM) + 1) if self.embed_dim % n == 0)
        self.attn_pool: Optional[nn.Module] = None
        if global_pool == "map":
            self.attn_pool = AttentionPoolLatent(self.embed_dim, num_heads=heads, norm_layer=norm_layer, **dd)
        elif global_pool == "prr":
            self.attn_pool = AttentionPoolPrr(
                self.embed_dim, num_heads=heads, pool_type="token", norm_layer=norm_layer, **dd
            )
        self.head_drop = nn.Dropout(drop_rate)
        self.head = self._make_classifier(num_classes, **dd)

    def _make_classifier(self, num_classes: int, device=None, dtype=None) -> nn.Module:
        if num_classes < 0:
            raise ValueError(f"num_classes is {num_classes}, expected 0 for no classifier, or more")
        if num_classes == 0:
            return nn.Identity()
        head = nn.Linear(self.num_features, num_classes, device=device, dtype=dtype)
        init_classifier(head)
        return head

    def get_classifier(self) -> nn.Module:
        """The last layer, from features to logits."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: Optional[str] = None) -> None:
        """Replaces the head by a new one on the model's device, in its dtype and mode.

        Args:
            num_classes: classes of the new head; 0 leaves it out.
            global_pool: new pooling; None keeps the present one. As in timm's models, one by attention ("map", "prr")
                can be taken out here but not put in.

        Raises:
            ValueError: an unknown pooling, one by attention that the model was not made with, or a negative number of classes.
        """
        if global_pool is not None and global_pool != self.global_pool:
            _check_pool(global_pool)
            if global_pool in ("map", "prr"):
                raise ValueError(
                    f"global_pool {global_pool!r} has layers that this model (pooling {self.global_pool!r}) was not made "
                    f"with; make a new model with global_pool={global_pool!r}"
                )
        head = self._make_classifier(num_classes, **get_device_dtype(self))
        if global_pool is not None and global_pool != self.global_pool:
            self.attn_pool, self.global_pool = None, global_pool
        self.num_classes, self.head = num_classes, head.train(self.training)

    def pool(self, x: Tensor, pool_type: Optional[str] = None) -> Tensor:
        """(B, 1 + M, C) tokens to (B, C), by `pool_type` or the model's own pooling; "" keeps the tokens."""
        if self.attn_pool is not None:
            if pool_type is None:
                return self.attn_pool(x if self.global_pool == "prr" else x[:, 1:])
        return global_pool_nlc(x, self.global_pool if pool_type is None else pool_type)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Tokens of `forward_features` to logits, (B, num_classes), or pooled features with `pre_logits`."""
        x = self.head_drop(self.pool(x))
        return x if pre_logits else self.head(x)


def init_classifier(head: nn.Module) -> None:
    """Starts a classifier, where there is one, with small weights and no bias."""
    if isinstance(head, nn.Linear):
        trunc_normal_(head.weight, std=0.02)
        nn.init.zeros_(head.bias)


def _check_pool(global_pool: str) -> None:
    if global_pool not in POOLS:
        raise ValueError(f"global_pool is {global_pool!r}, expected one of {', '.join(map(repr, POOLS))}")
