"""Convolutional stems: a few convolutions or a timm model before the patch embedding, as in timm's `HybridEmbed`.

The map of a stem has one position per patch, and images are padded before it, so that every size and stride works.
"""

import math
from typing import Any

import timm
import torch
from timm.layers import to_2tuple
from torch import Tensor, nn

from .patch_embed import PatchEmbed


class StemEmbed(PatchEmbed):
    """`PatchEmbed` with a stem, whose map a 1x1 convolution turns into tokens."""

    def __init__(self, stem: str | nn.Module, *args: Any, device=None, dtype=None, **kwargs: Any) -> None:
        """
        Args:
            stem: "conv" for stride-2 convolutions; the name of a timm model with features at stride `patch_size`; or a
                module from images (B, in_chans, H, W) to such a map, or to a list that ends with it.
            args: of `PatchEmbed`; stride is None or `patch_size`, which is the stride of the stem's map.
            device: of the parameters.
            dtype: of the parameters.
            kwargs: of `PatchEmbed`.

        Raises:
            ValueError: a stem without a map at this stride, or an image that is not a whole number of patches.
        """
        dd = {"device": device, "dtype": dtype}
        super().__init__(*args, **kwargs, **dd)  # type: ignore[misc]
        patch, in_chans, embed_dim = self.patch_size[0], self.in_chans, self.proj.out_channels
        if self.patch_size != self.stride or patch != self.patch_size[1]:
            raise ValueError(
                f"patch_size is {self.patch_size} and stride {self.stride}; a stem needs square patches without overlap"
            )
        if stem == "conv":
            stem = conv_stem(patch, in_chans, embed_dim, **dd)
        elif isinstance(stem, str):
            stem = timm_stem(stem, patch, in_chans, **dd)
        is_training, side = stem.training, 4 * patch
        with torch.no_grad():
            output = stem.eval()(torch.zeros(1, in_chans, side, side, **dd))
        stem.train(is_training)
        if isinstance(output, (list, tuple)):
            stem, output = nn.Sequential(stem, LastMap()), output[-1]
        if output.dim() != 4 or output.shape[2:] != (4, 4):
            raise ValueError(
                f"the stem returns {list(output.shape)} for an image of {side}x{side} pixels, expected a map "
                f"[1, channels, 4, 4] at stride {patch}; use another stem or patch_size"
            )
        del self.proj  # the stem comes before it in the order of parameters
        self.backbone, self.proj = stem, nn.Conv2d(output.shape[1], embed_dim, 1, **dd)

    def set_input_size(
        self, img_size: int | tuple[int, int] | None = None, patch_size: int | tuple[int, int] | None = None
    ) -> None:
        """Changes the image size, in pixels. Raises ValueError for another patch size."""
        if to_2tuple(patch_size or self.patch_size) != self.patch_size:
            raise ValueError(
                f"patch_size is {patch_size}, but the stem's is {self.patch_size[0]}: make a new model for another"
            )
        super().set_input_size(img_size)


class LastMap(nn.Module):
    """Returns the last of several maps."""

    def forward(self, x: list[Tensor]) -> Tensor:
        """The last element of x."""
        return x[-1]


def conv_stem(patch_size: int, in_chans: int, embed_dim: int, **dd) -> nn.Sequential:
    """3x3 convolutions of stride 2, each with a norm and a ReLU (Xiao et al., arXiv 2106.14881).

    The last one has embed_dim channels; each one before it has half the channels of the next. Raises ValueError if
    `patch_size` is not a power of two, at least 2.
    """
    if patch_size < 2 or not math.log2(patch_size).is_integer():
        raise ValueError(
            f"patch_size is {patch_size}, expected a power of two, at least 2: each convolution halves the resolution"
        )
    layers: list[nn.Module] = []
    for halvings in reversed(range(int(math.log2(patch_size)))):
        channels = max(1, embed_dim // 2**halvings)
        layers += [nn.Conv2d(in_chans, channels, 3, 2, 1, bias=False, **dd), nn.BatchNorm2d(channels, **dd), nn.ReLU()]
        in_chans = channels
    return nn.Sequential(*layers)


def timm_stem(name: str, stride: int, in_chans: int, **dd) -> nn.Module:
    """A timm model's features at `stride`. Raises ValueError if it has none."""
    reductions = timm.create_model(name, features_only=True, device="meta").feature_info.reduction()  # type: ignore
    if stride not in reductions:
        raise ValueError(f"{name} has features at strides {reductions}, none at {stride}; give a patch_size among them")
    return timm.create_model(name, features_only=True, out_indices=(reductions.index(stride),), in_chans=in_chans, **dd)
