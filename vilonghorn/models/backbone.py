"""What the models share of timm's contract."""

from typing import TYPE_CHECKING

import torch
from timm.layers import trunc_normal_
from timm.models._features import feature_take_indices
from torch import nn

NO_DECAY = ("pos_embed", "cls_token", "mask_token", "A_log", "D", "dt_bias", "conv_bias", "scan_norm")


class Backbone(nn.Module):
    """A model whose features are the outputs of the children of one module."""

    feature_layers: str  # "blocks" or "stages"
    if TYPE_CHECKING:
        norm: nn.Module
        mask_token: nn.Parameter | None

    @torch.jit.ignore
    def init_weights(self, needs_reset: bool = True) -> None:
        """Initialises the model, also after `to_empty`; `needs_reset`: also the layers that initialise themselves."""
        if needs_reset:
            # Children first: a mixer re-initialises its linear layers.
            self.apply(lambda module: getattr(module, "reset_parameters", lambda: None)())
        self._init_embedding()
        if self.mask_token is not None:
            trunc_normal_(self.mask_token, std=0.02)
        self._init_head()

    def _init_embedding(self) -> None:
        """Initialises what precedes the blocks, if it does not initialise itself."""

    def _init_head(self) -> None:
        head = self.get_classifier()  # type: ignore[operator]
        if isinstance(head, nn.Linear):
            trunc_normal_(head.weight, std=0.02)
            nn.init.zeros_(head.bias)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Names of the parameters without weight decay, whatever their shape."""
        return {name for name, _ in self.named_parameters() if name.rsplit(".", 1)[-1] in NO_DECAY}

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Keeps only the input of each block, and computes the block again in backward."""
        for module in self.modules():
            if hasattr(module, "grad_checkpointing"):
                module.grad_checkpointing = enable  # type: ignore[assignment]

    def image_size(self, rows: int, columns: int, block: int | None = None) -> tuple[int, int]:
        """Height and width, in pixels, of an image of `rows` x `columns` patches, as of `patches`."""
        (dy, dx), (height, width) = self.patches(block)  # type: ignore[operator]
        return (rows - 1) * dy + height, (columns - 1) * dx + width

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Removes the layers that the chosen features do not need, and the final norm or the head and the pooling.

        `indices` are blocks or stages to keep features of: the last n if an int. Returns them, counted from 0.
        """
        layers = getattr(self, self.feature_layers)
        take_indices, max_index = feature_take_indices(len(layers), indices)
        setattr(self, self.feature_layers, layers[: max_index + 1])
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")  # type: ignore[operator]
        return take_indices
