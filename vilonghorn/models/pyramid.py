"""`PyramidSSM`, the trunk with feature maps at four strides for detectors and segmentation decoders.

All maps come from the last block (`SimpleFeaturePyramid`), so weights of the plain trunk load.
"""

from typing import Any

import torch
from timm.layers import to_2tuple
from timm.models._features import feature_take_indices
from torch import Tensor, nn
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

from ..layers import SimpleFeaturePyramid
from .trunk import VisionSSM

STRIDES = (4, 8, 16, 32)


class PyramidSSM(VisionSSM):
    """`VisionSSM` whose features are maps at strides 4, 8, 16 and 32 with equal numbers of channels.

    By default it takes images of any size: they are padded to whole patches, and the maps are cropped to
    ceil(size / stride), as in a convolutional backbone. The head, if any, reads the average of the pooled maps.
    """

    num_default_features = len(STRIDES)
    pools = ("avg",)

    def __init__(
        self,
        pyramid_channels: int = 256,
        num_classes: int = 0,
        global_pool: str = "avg",
        dynamic_img_size: bool = True,
        dynamic_img_pad: bool = True,
        device=None,
        dtype=None,
        **trunk,
    ) -> None:
        """
        Args:
            pyramid_channels: channels of the maps.
            num_classes: classes of the head; 0 for no head.
            global_pool: "avg".
            dynamic_img_size: accept any image size; positions are resampled at each call.
            dynamic_img_pad: pad images to a whole number of patches.
            device: of the parameters.
            dtype: of the parameters.
            trunk: further arguments of `VisionSSM`.

        Raises:
            ValueError: another pooling, overlapping patches, or a stride that is not a power of two.
            TypeError: an unknown argument.
        """
        dd = {"device": device, "dtype": dtype}
        trunk |= dict(dynamic_img_size=dynamic_img_size, dynamic_img_pad=dynamic_img_pad)
        super().__init__(num_classes=0, global_pool=global_pool, **trunk, **dd)
        patch, stride = self.patch_embed.patch_size, self.patch_embed.stride
        if patch != stride or stride[0] != stride[1]:
            raise ValueError(
                f"patch_size is {patch[0]}x{patch[1]} and stride {stride[0]}x{stride[1]}; a feature pyramid needs "
                "square patches without overlap"
            )
        self.pyramid = SimpleFeaturePyramid(self.embed_dim, pyramid_channels, stride[0], STRIDES, **dd)
        self.feature_info = [
            dict(module=f"pyramid.levels.{i}", num_chs=pyramid_channels, reduction=s) for i, s in enumerate(STRIDES)
        ]
        self.num_prefix_tokens = 0
        self.num_features = self.head_hidden_size = pyramid_channels
        self.reset_classifier(num_classes)

    def set_input_size(
        self, img_size: int | tuple[int, int] | None = None, patch_size: int | tuple[int, int] | None = None
    ) -> None:
        """Changes the image size, in pixels. Raises ValueError for another patch size; the pyramid is made for one."""
        if to_2tuple(patch_size or self.patch_embed.patch_size) != self.patch_embed.patch_size:
            raise ValueError(
                f"patch_size is {patch_size}, but the pyramid is made for patches of {self.patch_embed.patch_size[0]} "
                f"pixels; make a new model with patch_size={patch_size}"
            )
        super().set_input_size(img_size)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[list[Tensor], list[Tensor]]:
        """Runs the model and returns the chosen maps.

        Args:
            x: images, (B, in_chans, H, W).
            indices: levels to return, 0 is the finest: the last n if an int, all if None.
            norm: no effect, as of `stop_early`: every map is made from the normed tokens of the last block.
            stop_early: no effect.
            output_fmt: "NCHW".
            intermediates_only: do not return the final features, which are all maps.

        Raises:
            ValueError: another format.
        """
        if output_fmt != "NCHW":
            raise ValueError(f"output_fmt is {output_fmt!r}, expected 'NCHW'; the features of a pyramid are maps")
        chosen, _ = feature_take_indices(len(STRIDES), indices)
        maps = self.forward_features(x)
        kept = [level for name, level in zip(self.pyramid.levels, maps) if int(name) in chosen]
        return kept if intermediates_only else (maps, kept)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Removes the levels that are not among `indices` (the last n if an int), and the head.

        `prune_norm` has no effect. With `prune_head=False` all levels stay, because the head reads each of them.
        Returns the indices of the chosen levels, counted from 0.
        """
        chosen, _ = feature_take_indices(len(STRIDES), indices)
        if prune_head:
            self.reset_classifier(0)
            for name in set(self.pyramid.levels) - {str(i) for i in chosen}:
                del self.pyramid.levels[name]
        return chosen

    def forward_features(self, x: Tensor) -> list[Tensor]:
        """(B, in_chans, H, W) images to a map (B, pyramid_channels, ceil(H / s), ceil(W / s)) for each stride s."""
        H, W = x.shape[-2:]
        tokens, grid = self._embed(x), self._grid(x)
        tokens = self._norm_tokens(self.blocks(tokens, grid, self.grad_checkpointing))[:, 1:]
        h, w = self.patch_embed.dynamic_feat_size((H, W))
        padded: tuple[int, int] | None = None
        if self.patch_embed.dynamic_img_pad:
            padded = self.patch_embed.padding((H, W))
        return list(self.pyramid(tokens.transpose(1, 2).unflatten(2, [h, w]), padded).values())

    def pool(self, x: list[Tensor]) -> Tensor:
        """Average of the average-pooled maps, (B, pyramid_channels)."""
        return torch.stack([level.mean([2, 3]) for level in x]).mean(0)

    def forward_head(self, x: list[Tensor], pre_logits: bool = False) -> Tensor:
        """Maps of `forward_features` to logits, (B, num_classes), or pooled features with `pre_logits`."""
        pooled = self.head_drop(self.pool(x))
        return pooled if pre_logits else self.head(pooled)


class DetectionBackbone(nn.Module):
    """A backbone for torchvision's detectors: maps by name, "0" to "pool", and `out_channels`."""

    def __init__(self, model: nn.Module) -> None:
        """
        Args:
            model: `timm.create_model("..._sfp", features_only=True)`.

        Raises:
            ValueError: maps with different numbers of channels, or several at one stride.
        """
        super().__init__()
        info: Any = model.feature_info
        channels, strides = info.channels(), info.reduction()
        if len(set(channels)) > 1 or len(set(strides)) < len(strides):
            raise ValueError(
                f"the maps have {channels} channels and strides {strides}, expected equal channels and different "
                "strides; use a model whose name ends in _sfp, or one map: out_indices=(-1,)"
            )
        self.model, self.out_channels = model, channels[0]
        self.extra_blocks = LastLevelMaxPool()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """(B, in_chans, H, W) images to maps (B, out_channels, h, w), by name."""
        maps = self.model(x)
        maps, names = self.extra_blocks(maps, maps, [str(i) for i in range(len(maps))])
        return dict(zip(names, maps))
