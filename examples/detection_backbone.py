"""`DetectionBackbone`, which gives a backbone's maps to torchvision's detectors and keeps padding out of them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection import FCOS, FasterRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import FeaturePyramidNetwork, MultiScaleRoIAlign
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool


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
            ValueError: several maps at one stride, maps in another order than `feature_info`, or a classifier.
        """
        super().__init__()
        info: Any = getattr(model, "feature_info", None)
        if not hasattr(info, "channels"):
            raise ValueError(f"the model is a {type(model).__name__}, expected one made with features_only=True")
        channels, strides = info.channels(), info.reduction()
        if len(set(strides)) < len(strides):
            raise ValueError(
                f"the maps have strides {strides}, expected different ones: use vilonghornv2_tiny, or one map"
            )
        if strides != sorted(strides):  # timm's extractors return maps in the order of the layers
            raise ValueError(f"feature_info has strides {strides}, expected them rising: give out_indices in order")
        same = len(set(channels)) == 1
        self.model, self.stride, self.out_channels = model, strides[-1], channels[0] if same else out_channels
        self.strides = [*strides, 2 * strides[-1]]  # of all maps, "pool" included
        self.fpn = nn.Identity() if same else FeaturePyramidNetwork(channels, out_channels)
        self.extra_blocks = LastLevelMaxPool()
        self._next_sizes: Sequence[tuple[int, int]] | None = None  # of the next batch, from the detector
        self._sizes: list[list[int]] = []  # of images, the last of the batch, padded to a multiple of the last stride
        self._keep_padding_out(self.fpn)

    def forward(self, x: Tensor, image_sizes: Sequence[tuple[int, int]] | None = None) -> dict[str, Tensor]:
        """Images to maps (B, out_channels, h, w), by name.

        Args:
            x: images, (B, in_chans, H, W), padded at the bottom and at the right.
            image_sizes: height and width of each image without its padding; maps are zero in padding.

        Raises:
            ValueError: sizes that do not fit the batch, or a model that takes no `pixel_mask`.
        """
        sizes, self._next_sizes, self._sizes = image_sizes or self._next_sizes, None, []
        getter: Any = self.model
        if sizes is None:
            maps = getter(x)
        else:
            H, W = x.shape[2:]
            if len(sizes) != len(x) or not all(0 < h <= H and 0 < w <= W for h, w in sizes):
                raise ValueError(f"image_sizes is {sizes}, expected {len(x)} pairs (height, width) of at most {H}x{W}")
            if not getattr(getattr(getter, "model", None), "takes_pixel_mask", False):
                raise ValueError("image_sizes need a model that takes pixel_mask, such as vilonghornv2_tiny")
            self._sizes = [[side + -side % getter.model.stride for side in size] for size in (*sizes, (H, W))]
            pixel_mask = torch.stack([F.pad(x.new_ones(h, w), (0, W - w, 0, H - h)) for h, w in sizes])
            options = dict(indices=getter.out_indices, norm=getter.norm, intermediates_only=True)
            maps = getter.model.forward_intermediates(x, pixel_mask=pixel_mask, **options)
        named = self.fpn({str(i): y for i, y in enumerate(maps)})
        maps, names = self.extra_blocks(list(named.values()), maps, list(named))
        return dict(zip(names, maps))

    def anchors(self, detector: type) -> dict[str, AnchorGenerator]:
        """The argument of a detector's class that sets its anchors: torchvision's, at the strides of these maps.

        The size of an anchor is 8 strides for Faster, Mask and Keypoint R-CNN, 4 for RetinaNet, 1 for FCOS.

        Raises:
            ValueError: another class.
        """
        if issubclass(detector, FasterRCNN):
            name, sizes, ratios = "rpn_anchor_generator", [(8 * s,) for s in self.strides], (0.5, 1.0, 2.0)
        elif issubclass(detector, RetinaNet):
            name, ratios = "anchor_generator", (0.5, 1.0, 2.0)
            sizes = [tuple(int(4 * s * 2 ** (i / 3)) for i in range(3)) for s in self.strides]
        elif issubclass(detector, FCOS):
            name, sizes, ratios = "anchor_generator", [(s,) for s in self.strides], (1.0,)
        else:
            raise ValueError(f"the detector is {detector.__name__}, expected FasterRCNN, RetinaNet, FCOS or a subclass")
        return {name: AnchorGenerator(tuple(sizes), (ratios,) * len(sizes))}

    def attach(self, detector: Any) -> Any:
        """Makes the boxes of an image independent of the other images of its batch; returns the detector.

        The backbone gets the image sizes from `detector.transform`, which pads to multiples of the coarsest stride.
        Convolutions, GroupNorm and pooling of regions do not read padding; in evaluation mode it has no boxes.

        Args:
            detector: torchvision's Faster, Mask or Keypoint R-CNN, FCOS or RetinaNet.

        Raises:
            ValueError: the detector has another backbone, or anchors of another number of maps.
        """
        if detector.backbone is not self:
            raise ValueError(f"the detector's backbone is {type(detector.backbone).__name__}, not this one: make it so")
        transform, dense = detector.transform, getattr(detector, "rpn", detector)
        if (number := len(dense.anchor_generator.sizes)) != len(self.strides):
            kind, remedy = type(detector).__name__, "make the detector with **backbone.anchors"
            raise ValueError(f"anchors are of {number} maps, expected {len(self.strides)}: {remedy}({kind})")
        transform.size_divisible = max(transform.size_divisible, 2 * self.stride)
        transform.register_forward_hook(self._after_transform)
        self._keep_padding_out(dense.head)
        dense.score_thresh = max(dense.score_thresh, 1e-7)  # the score of padding is 0
        for module in detector.modules():
            if isinstance(module, MultiScaleRoIAlign):
                module.register_forward_pre_hook(self._before_pooling)
        return detector

    def _per_image(self, y: Tensor, run: Callable[[Tensor], Tensor] = lambda y: y, **pad: Any) -> Tensor:
        """Runs a function on the map of each image without padding, and pads its results with zeros, or as given."""
        (H, W), outputs = y.shape[2:], []
        for image, size in zip(y, self._sizes):
            h, w = (-(-side * n // whole) for side, n, whole in zip(size, (H, W), self._sizes[-1]))
            outputs.append(F.pad(run(image[None, :, :h, :w]), (0, W - w, 0, H - h), **pad))
        return torch.cat(outputs)

    def _keep_padding_out(self, layers: nn.Module) -> None:
        """Zeros what convolutions write into padding, and normalises each image alone in GroupNorms."""
        for name, layer in layers.named_modules():
            if isinstance(layer, nn.Conv2d | nn.GroupNorm):
                layer.register_forward_hook(partial(self._after_layer, is_score="cls_logits" in name))

    def _after_layer(self, layer: nn.Module, inputs: tuple[Tensor], y: Tensor, is_score: bool) -> Tensor:
        if not self._sizes or is_score and layer.training:
            return y
        if isinstance(layer, nn.GroupNorm):
            return self._per_image(inputs[0], layer.forward)
        return self._per_image(y, value=-1e4 if is_score else 0.0)

    def _before_pooling(self, pool: nn.Module, inputs: tuple) -> tuple | None:
        if not self._sizes:
            return None
        return {name: self._per_image(y, mode="replicate") for name, y in inputs[0].items()}, *inputs[1:]

    def _after_transform(self, transform: nn.Module, inputs: tuple, outputs: tuple) -> None:
        self._next_sizes = outputs[0].image_sizes
