"""`PyramidSSM`, the trunk with feature maps at four strides for detectors and segmentation decoders.

All maps come from the last block (`SimpleFeaturePyramid`), so weights of the plain trunk load.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import to_2tuple
from timm.models._features import feature_take_indices
from torch import Tensor, nn
from torchvision.ops import FeaturePyramidNetwork, MultiScaleRoIAlign
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

from ..layers import SimpleFeaturePyramid
from .hierarchy import HierarchicalSSM
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
        mask: Tensor | None = None,
    ) -> list[Tensor] | tuple[list[Tensor], list[Tensor]]:
        """Runs the model and returns the chosen maps.

        Args:
            x: images, (B, in_chans, H, W).
            indices: levels to return, 0 is the finest: the last n if an int, all if None.
            norm: no effect, as of `stop_early`: every map is made from the normed tokens of the last block.
            stop_early: no effect.
            output_fmt: "NCHW".
            intermediates_only: do not return the final features, which are all maps.
            mask: as of `VisionSSM.forward_features`.

        Raises:
            ValueError: another format.
        """
        if output_fmt != "NCHW":
            raise ValueError(f"output_fmt is {output_fmt!r}, expected 'NCHW'; the features of a pyramid are maps")
        chosen, _ = feature_take_indices(len(STRIDES), indices)
        maps = self.forward_features(x, mask)
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

    def forward_features(self, x: Tensor, mask: Tensor | None = None) -> list[Tensor]:
        """(B, in_chans, H, W) images to a map (B, pyramid_channels, ceil(H / s), ceil(W / s)) for each stride s.

        `mask` as of `VisionSSM.forward_features`.
        """
        H, W = x.shape[-2:]
        tokens, grid = self._embed(x, mask), self._grid(x)
        tokens = self._norm_tokens(self.blocks(tokens, grid, self.grad_checkpointing))[:, 1:]
        h, w = self.patch_embed.dynamic_feat_size((H, W))
        padded = self.patch_embed.padding((H, W)) if self.patch_embed.dynamic_img_pad else None
        return list(self.pyramid(tokens.transpose(1, 2).unflatten(2, [h, w]), padded).values())

    def pool(self, x: list[Tensor]) -> Tensor:
        """Average of the average-pooled maps, (B, pyramid_channels)."""
        return torch.stack([level.mean([2, 3]) for level in x]).mean(0)

    def forward_head(self, x: list[Tensor], pre_logits: bool = False) -> Tensor:
        """Maps of `forward_features` to logits, (B, num_classes), or pooled features with `pre_logits`."""
        pooled = self.head_drop(self.pool(x))
        return pooled if pre_logits else self.head(pooled)


class DetectionBackbone(nn.Module):
    """A backbone for torchvision's detectors: maps by name, "0" to "pool", and `out_channels`.

    Maps with different channels go through a feature pyramid network (arXiv 1612.03144). With the sizes of the images
    in a padded batch (an argument, or `attach`), the maps of an image in a hierarchy are those that it has alone.
    """

    def __init__(self, model: nn.Module, out_channels: int = 256) -> None:
        """
        Args:
            model: `timm.create_model("vilonghornv2_tiny", features_only=True)`, or another model's feature extractor.
            out_channels: channels of the feature pyramid network, where the maps have different channels.

        Raises:
            ValueError: several maps at one stride.
        """
        super().__init__()
        info: Any = model.feature_info
        channels, strides = info.channels(), info.reduction()
        if len(set(strides)) < len(strides):
            raise ValueError(
                f"the maps have strides {strides}, expected different ones: use vilonghornv2_tiny, or one map"
            )
        same = len(set(channels)) == 1
        self.model, self.stride, self.out_channels = model, strides[-1], channels[0] if same else out_channels
        self.fpn = nn.Identity() if same else FeaturePyramidNetwork(channels, out_channels)
        self.extra_blocks = LastLevelMaxPool()
        self._next_sizes: Sequence[tuple[int, int]] | None = None  # of the next batch, from the detector
        self._sizes: list[list[int]] = []  # of images, the last of the batch, padded to a multiple of the last stride
        self._hook(self.fpn)

    def forward(self, x: Tensor, image_sizes: Sequence[tuple[int, int]] | None = None) -> dict[str, Tensor]:
        """Images to maps (B, out_channels, h, w), by name.

        Args:
            x: images, (B, in_chans, H, W), padded at the bottom and at the right.
            image_sizes: height and width of each image without its padding; maps are zero in padding.

        Raises:
            ValueError: sizes that do not fit the batch, or a model that takes no mask.
        """
        sizes, self._next_sizes, self._sizes = image_sizes or self._next_sizes, None, []
        getter: Any = self.model
        if sizes is None:
            maps = getter(x)
        else:
            H, W = x.shape[2:]
            if len(sizes) != len(x) or not all(0 < h <= H and 0 < w <= W for h, w in sizes):
                raise ValueError(f"image_sizes is {sizes}, expected {len(x)} pairs (height, width) of at most {H}x{W}")
            if not isinstance(getattr(getter, "model", None), HierarchicalSSM):
                raise ValueError("image_sizes need a model that takes masks, such as vilonghornv2_tiny")
            self._sizes = [[side + -side % getter.model.stride for side in size] for size in (*sizes, (H, W))]
            mask = torch.stack([F.pad(x.new_ones(h, w), (0, W - w, 0, H - h)) for h, w in sizes])
            options = dict(indices=getter.out_indices, norm=getter.norm, intermediates_only=True)
            maps = getter.model.forward_intermediates(x * mask[:, None], pixel_mask=mask, **options)
        named = self.fpn({str(i): y for i, y in enumerate(maps)})
        maps, names = self.extra_blocks(list(named.values()), maps, list(named))
        return dict(zip(names, maps))

    def attach(self, detector: Any) -> Any:
        """Makes the boxes of an image independent of the other images of its batch; returns the detector.

        The backbone gets the image sizes from `detector.transform`, which pads to multiples of the coarsest stride.
        Convolutions, GroupNorm and pooling of regions do not read padding; in evaluation mode it has no boxes.

        Args:
            detector: torchvision's Faster, Mask or Keypoint R-CNN, FCOS or RetinaNet.

        Raises:
            ValueError: the detector has another backbone.
        """
        if detector.backbone is not self:
            raise ValueError(f"the detector's backbone is {type(detector.backbone).__name__}, not this one: make it so")
        transform, dense = detector.transform, getattr(detector, "rpn", detector)
        transform.size_divisible = max(transform.size_divisible, 2 * self.stride)
        transform.register_forward_hook(self._after_transform)
        self._hook(dense.head)
        dense.score_thresh = max(dense.score_thresh, 1e-7)  # the score of padding is 0
        for module in detector.modules():
            if isinstance(module, MultiScaleRoIAlign):
                module.register_forward_pre_hook(self._before_pooling)
        return detector

    def _each(self, y: Tensor, run: Callable[[Tensor], Tensor] = lambda y: y, **pad: Any) -> Tensor:
        """Runs a function on the map of each image without padding, and pads its results with zeros, or as given."""
        (H, W), outputs = y.shape[2:], []
        for image, size in zip(y, self._sizes):
            h, w = (-(-side * n // whole) for side, n, whole in zip(size, (H, W), self._sizes[-1]))
            outputs.append(F.pad(run(image[None, :, :h, :w]), (0, W - w, 0, H - h), **pad))
        return torch.cat(outputs)

    def _hook(self, layers: nn.Module) -> None:
        for name, layer in layers.named_modules():
            if isinstance(layer, nn.Conv2d | nn.GroupNorm):
                layer.register_forward_hook(partial(self._after_layer, is_score="cls_logits" in name))

    def _after_layer(self, layer: nn.Module, inputs: tuple[Tensor], y: Tensor, is_score: bool) -> Tensor:
        if not self._sizes or is_score and layer.training:
            return y
        norm = isinstance(layer, nn.GroupNorm)
        return self._each(inputs[0], layer.forward) if norm else self._each(y, value=-1e4 if is_score else 0.0)

    def _before_pooling(self, pool: nn.Module, inputs: tuple) -> tuple | None:
        maps = {name: self._each(y, mode="replicate") for name, y in inputs[0].items()} if self._sizes else inputs[0]
        return maps, *inputs[1:]

    def _after_transform(self, transform: nn.Module, inputs: tuple, outputs: tuple) -> None:
        self._next_sizes = outputs[0].image_sizes
