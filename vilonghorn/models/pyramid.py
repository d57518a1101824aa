"""`PyramidSSM`, the trunk with feature maps at four strides, which detectors and decoders of segmentation expect.

The maps are made of the last block's alone, so that a plain trunk needs no stages and its weights load. How they are made is
the affair of `SimpleFeaturePyramid`.
"""

from collections import OrderedDict
from typing import Dict, List, Optional, Tuple, Union

import torch
from timm.layers import get_device_dtype
from torch import Tensor, nn
from torchvision.ops.feature_pyramid_network import ExtraFPNBlock, LastLevelMaxPool

from ..layers import SimpleFeaturePyramid
from ._timm import feature_take_indices
from .trunk import VisionSSM

STRIDES = (4, 8, 16, 32)


class PyramidSSM(VisionSSM):
    """`VisionSSM` whose features are maps at strides 4, 8, 16 and 32, of the same number of channels each.

    By default it takes images of any size: they are padded to whole patches, and the maps cut to ceil(size / stride), as
    a convolutional backbone has them. Its classifier, if it has one, reads the mean of the maps' means.
    """

    num_default_features = len(STRIDES)

    def __init__(
        self,
        pyramid_channels: int = 256,
        num_classes: int = 0,
        global_pool: str = "avg",
        dynamic_img_size: bool = True,
        dynamic_img_pad: bool = True,
        patch_drop_rate: float = 0.0,
        device=None,
        dtype=None,
        **trunk,
    ) -> None:
        """
        Args:
            pyramid_channels: channels of the maps.
            num_classes: classes of the head; 0 leaves the head out.
            global_pool: "avg".
            dynamic_img_size: accept any image size; positions are resampled at each call.
            dynamic_img_pad: pad images to a whole number of patches.
            patch_drop_rate: 0, as maps have a place for every patch.
            device: of the parameters.
            dtype: of the parameters.
            trunk: further arguments of `VisionSSM`.

        Raises:
            ValueError: another pooling, dropped patches, patches that overlap or whose stride is no power of two.
            TypeError: an unknown argument.
        """
        if patch_drop_rate:
            raise ValueError(
                f"patch_drop_rate is {patch_drop_rate}, expected 0: a feature map has a place for every patch"
            )
        dd = {"device": device, "dtype": dtype}
        _check_pool(global_pool)
        super().__init__(
            num_classes=0,
            global_pool="",
            dynamic_img_size=dynamic_img_size,
            dynamic_img_pad=dynamic_img_pad,
            **trunk,
            **dd,
        )
        patch, stride = self.patch_embed.patch_size, self.patch_embed.stride
        if patch != stride or stride[0] != stride[1]:
            raise ValueError(
                f"patches of {patch[0]}x{patch[1]} pixels at stride {stride[0]}x{stride[1]} have no grid that maps at strides "
                f"{', '.join(map(str, STRIDES))} could be made of; expected square patches that do not overlap"
            )
        self.pyramid = SimpleFeaturePyramid(self.embed_dim, pyramid_channels, stride[0], STRIDES, **dd)
        self.feature_info = [
            dict(module=f"pyramid.levels.{i}", num_chs=pyramid_channels, reduction=s) for i, s in enumerate(STRIDES)
        ]
        self.num_prefix_tokens = 0
        self.num_features = self.head_hidden_size = pyramid_channels
        self.num_classes, self.global_pool = num_classes, global_pool
        self.head = self._make_classifier(num_classes, **dd)

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> Dict[str, Union[str, List]]:
        """Patterns that sort parameters by depth; the pyramid is as deep as the final norm."""
        groups = super().group_matcher(coarse)
        return {**groups, "blocks": [*groups["blocks"], (r"^pyramid", (99999,))]}

    def set_input_size(
        self,
        img_size: Union[int, Tuple[int, int], None] = None,
        patch_size: Union[int, Tuple[int, int], None] = None,
    ) -> None:
        """Fits the model to another image size.

        Args:
            img_size: new height and width, in pixels; None keeps the present ones.
            patch_size: the present one, or None.

        Raises:
            ValueError: another patch size, as the pyramid is made for one.
        """
        if patch_size not in (None, self.patch_embed.patch_size[0], self.patch_embed.patch_size):
            raise ValueError(
                f"patch_size is {patch_size}, but the pyramid is made for patches of {self.patch_embed.patch_size[0]} pixels; "
                f"make a new model with patch_size={patch_size}"
            )
        super().set_input_size(img_size)

    def reset_classifier(self, num_classes: int, global_pool: Optional[str] = None) -> None:
        """Replaces the head by a new one on the model's device, in its dtype and mode.

        Args:
            num_classes: classes of the new head; 0 leaves it out.
            global_pool: "avg" or None.

        Raises:
            ValueError: another pooling.
        """
        if global_pool is not None:
            _check_pool(global_pool)
        self.head = self._make_classifier(num_classes, **get_device_dtype(self)).train(self.training)
        self.num_classes = num_classes

    def forward_features(self, x: Tensor) -> List[Tensor]:
        """(B, in_chans, H, W) images to a map (B, pyramid_channels, ceil(H / s), ceil(W / s)) for each stride s."""
        H, W = x.shape[-2:]
        tokens = self._encode(x)[
            :, 1:
        ]  # before sizes are asked for: torch.fx knows a module's leaves once it was called
        h, w = self.patch_embed.dynamic_feat_size((H, W))
        padded: Optional[Tuple[int, int]] = None
        if self.patch_embed.dynamic_img_pad:
            padded = self.patch_embed.padding((H, W))
        return list(self.pyramid(tokens.transpose(1, 2).unflatten(2, [h, w]), padded).values())

    def pool(self, x: List[Tensor]) -> Tensor:
        """Maps to the mean of their means, (B, pyramid_channels)."""
        return torch.stack([level.mean([2, 3]) for level in x]).mean(0)

    def forward_head(self, x: List[Tensor], pre_logits: bool = False) -> Tensor:
        """Maps of `forward_features` to logits, (B, num_classes), or pooled features with `pre_logits`."""
        pooled = self.head_drop(self.pool(x))
        return pooled if pre_logits else self.head(pooled)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: Optional[Union[int, List[int]]] = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Union[List[Tensor], Tuple[List[Tensor], List[Tensor]]]:
        """Runs the model and keeps the chosen maps.

        Args:
            x: images, (B, in_chans, H, W).
            indices: levels to keep, the finest is 0: the last n if an int, all if None.
            norm: no effect, every map is normed.
            stop_early: no effect, every map is made of the last block's.
            output_fmt: "NCHW".
            intermediates_only: leave out the final features, which are all the maps.

        Raises:
            ValueError: another format.
        """
        if output_fmt != "NCHW":
            raise ValueError(f"output_fmt is {output_fmt!r}, expected 'NCHW': the features of a pyramid are maps")
        chosen, _ = feature_take_indices(len(STRIDES), indices)
        maps = self.forward_features(x)
        kept = [level for name, level in zip(self.pyramid.levels, maps) if int(name) in chosen]
        return kept if intermediates_only else (maps, kept)

    def prune_intermediate_layers(
        self,
        indices: Union[int, List[int]] = 1,
        prune_norm: bool = False,
        prune_head: bool = True,
    ) -> List[int]:
        """Removes what the chosen maps do not need.

        Args:
            indices: levels to keep: the last n if an int.
            prune_norm: no effect, as every map is made of normed tokens.
            prune_head: also the head. One that stays reads every level, so that they all stay.

        Returns:
            Indices of the chosen levels, counted from 0.
        """
        chosen, _ = feature_take_indices(len(STRIDES), indices)
        if prune_head:
            self.reset_classifier(0)
            for name in set(self.pyramid.levels) - {str(i) for i in chosen}:
                del self.pyramid.levels[name]
        return chosen


class DetectionBackbone(nn.Module):
    """A pyramid as torchvision's detectors take it: maps by name, "0" the finest, and their `out_channels`."""

    def __init__(self, model: nn.Module, extra_blocks: Optional[ExtraFPNBlock] = None) -> None:
        """
        Args:
            model: of `timm.create_model("..._sfp", features_only=True)`.
            extra_blocks: makes coarser maps of the last. Default: torchvision's `LastLevelMaxPool`, which makes "pool".

        Raises:
            ValueError: maps of unequal channels.
        """
        super().__init__()
        channels = model.feature_info.channels()
        if len(set(channels)) > 1:
            raise ValueError(
                f"the maps have {channels} channels, expected as many in each: take a model whose name ends in _sfp"
            )
        self.model, self.out_channels = model, channels[0]
        self.names = [str(i) for i in range(len(channels))]
        self.extra_blocks = LastLevelMaxPool() if extra_blocks is None else extra_blocks

    def forward(self, x: Tensor) -> Dict[str, Tensor]:
        """(B, in_chans, H, W) images to maps (B, out_channels, h, w), by name."""
        maps = self.model(x)
        maps, names = self.extra_blocks(maps, maps, list(self.names))
        return OrderedDict(zip(names, maps))


def _check_pool(global_pool: str) -> None:
    if global_pool != "avg":
        raise ValueError(f"global_pool is {global_pool!r}, expected 'avg'; take the maps with features_only=True")
