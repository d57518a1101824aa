"""What a backbone gives from between its blocks: intermediate features, and pruning to what they need.

timm's feature extractor (`features_only=True`) is built on these two methods; the trunk runs the blocks.
"""

from typing import Dict, List, Optional, Tuple, Union

from timm.models import checkpoint
from torch import Tensor, nn

from ..layers import prefix_first
from ._timm import feature_take_indices


class IntermediateFeatures:
    """Mixin of `VisionSSM`: `forward_intermediates` and `prune_intermediate_layers`, as timm's backbones have them."""

    def forward_intermediates(
        self,
        x: Tensor,
        indices: Optional[Union[int, List[int]]] = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
    ) -> Union[List[Tensor], Tuple[Tensor, List[Tensor]], Dict[str, Union[Tensor, List[Tensor]]]]:
        """Runs the model and keeps what leaves the chosen blocks.

        Args:
            x: images, (B, in_chans, H, W).
            indices: blocks to keep: the last n if an int, all if None.
            return_prefix_tokens: pair each feature with its class token, (B, 1, C).
            norm: pass the features through the final norm.
            stop_early: leave out the blocks after the last one kept.
            output_fmt: "NCHW" for maps (B, C, h, w), "NLC" for tokens (B, M, C).
            intermediates_only: leave out the final features.
            output_dict: return a dictionary.

        Returns:
            (final features, features), or the features alone, or a dictionary with `image_features`,
            `image_intermediates` and, if asked, `image_intermediates_prefix`.

        Raises:
            ValueError: an unknown format.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"output_fmt is {output_fmt!r}, expected 'NCHW' or 'NLC'")
        take_indices, max_index = feature_take_indices(len(self.blocks), indices)
        height, width = x.shape[-2:]
        x = self._embed(x)
        kept = []
        for i, block in enumerate(self.blocks[: max_index + 1] if stop_early else self.blocks):
            x = checkpoint(block, x) if self.grad_checkpointing else block(x)
            if i in take_indices:
                tokens = self._to_parameter_dtype(prefix_first(x))
                kept.append(self.norm(tokens) if norm else tokens)
        prefix = [tokens[:, :1] for tokens in kept]
        features = [tokens[:, 1:] for tokens in kept]
        if output_fmt == "NCHW":
            H, W = self.patch_embed.dynamic_feat_size((height, width))
            features = [tokens.unflatten(1, (H, W)).permute(0, 3, 1, 2).contiguous() for tokens in features]
        if output_dict:
            result = {"image_intermediates": features}
            if return_prefix_tokens:
                result["image_intermediates_prefix"] = prefix
            if not intermediates_only:
                result["image_features"] = self._finish(x)
            return result
        if return_prefix_tokens:
            features = list(zip(features, prefix))
        return features if intermediates_only else (self._finish(x), features)

    def prune_intermediate_layers(
        self,
        indices: Union[int, List[int]] = 1,
        prune_norm: bool = False,
        prune_head: bool = True,
    ) -> List[int]:
        """Removes what the chosen features do not need.

        Args:
            indices: blocks to keep features of: the last n if an int.
            prune_norm: also the final norm.
            prune_head: also the head, and the pooling.

        Returns:
            Indices of the chosen blocks, counted from 0.
        """
        take_indices, max_index = feature_take_indices(len(self.blocks), indices)
        self.blocks = self.blocks[: max_index + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return take_indices
