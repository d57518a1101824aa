"""Convolutional stems: a few convolutions, or a whole backbone of timm's, between the image and the tokens.

A stem gives a map at one position a patch, as in timm's `HybridEmbed`; a 1x1 convolution makes tokens of it. Sizes, padding and
their errors are those of `PatchEmbed`.
"""

import math
from typing import List, Tuple, Union

import timm
import torch
from timm.layers import to_2tuple
from torch import Tensor, nn

from .patch_embed import PatchEmbed


class StemEmbed(PatchEmbed):
    """Image to tokens by a stem: `PatchEmbed` with something else than its one convolution."""

    def __init__(
        self,
        stem: Union[str, nn.Module],
        img_size: Union[int, Tuple[int, int]] = 224,
        patch_size: Union[int, Tuple[int, int]] = 16,
        stride: Union[int, Tuple[int, int], None] = None,
        in_chans: int = 3,
        embed_dim: int = 192,
        strict_img_size: bool = True,
        dynamic_img_pad: bool = False,
        device=None,
        dtype=None,
    ) -> None:
        """
        Args:
            stem: "conv", for `conv_stem`; the name of a timm model whose features reach a stride of `patch_size`; or a module
                from images (B, in_chans, H, W) to such a map, or to several of which the last is one.
            img_size: image height and width, in pixels.
            patch_size: pixels of the image to a position of the map.
            stride: None or `patch_size`: a stem's patches overlap as its convolutions do.
            in_chans: image channels.
            embed_dim: width of the tokens.
            strict_img_size: refuse images of another size than `img_size`.
            dynamic_img_pad: pad images at the bottom and at the right to a whole number of patches.
            device: of the parameters.
            dtype: of the parameters.

        Raises:
            ValueError: a stem that gives no map at this stride, or an image that is not a whole number of patches.
        """
        dd = {"device": device, "dtype": dtype}
        super().__init__(img_size, patch_size, stride, in_chans, embed_dim, strict_img_size, dynamic_img_pad, **dd)
        patch = self.patch_size[0]
        if self.patch_size != self.stride or patch != self.patch_size[1]:
            raise ValueError(
                f"patches of {self.patch_size} at stride {self.stride} cannot be those of a stem: expected square ones, and "
                "no stride beside patch_size"
            )
        if stem == "conv":
            stem = conv_stem(patch, in_chans, embed_dim, **dd)
        elif isinstance(stem, str):
            stem = timm.create_model(
                stem, features_only=True, out_indices=(_stage(stem, patch),), in_chans=in_chans, **dd
            )
        self.backbone, channels = self._checked(stem, **dd)
        self.proj = nn.Conv2d(channels, embed_dim, 1, **dd)

    def _checked(self, stem: nn.Module, device=None, dtype=None) -> Tuple[nn.Module, int]:
        """The stem, made to give one map, which is checked to lie at the stride of the patches; and the map's channels."""
        training, side = stem.training, 4 * self.patch_size[0]
        with torch.no_grad():
            made = stem.eval()(torch.zeros(1, self.in_chans, side, side, device=device, dtype=dtype))
        stem.train(training)
        if isinstance(made, (list, tuple)):
            stem, made = nn.Sequential(stem, LastMap()), made[-1]
        if made.dim() != 4 or made.shape[2:] != (4, 4):
            raise ValueError(
                f"the stem makes {list(made.shape)} of an image of {side}x{side} pixels, expected a map [1, channels, 4, 4]: a "
                f"position for {self.patch_size[0]} pixels. Take another stem or patch_size"
            )
        return stem, made.shape[1]

    def set_input_size(
        self,
        img_size: Union[int, Tuple[int, int], None] = None,
        patch_size: Union[int, Tuple[int, int], None] = None,
    ) -> None:
        """Changes the image size.

        Args:
            img_size: new height and width; None keeps the present ones.
            patch_size: None or the present one.

        Raises:
            ValueError: another patch size, or an image that is not a whole number of patches.
        """
        if patch_size is not None and to_2tuple(patch_size) != self.patch_size:
            raise ValueError(
                f"patch_size is {patch_size}, but the stem's is {self.patch_size[0]}: make a new model for another"
            )
        super().set_input_size(img_size)


class LastMap(nn.Module):
    """The last of several maps."""

    def forward(self, x: List[Tensor]) -> Tensor:
        return x[-1]


def conv_stem(patch_size: int, in_chans: int, embed_dim: int, device=None, dtype=None) -> nn.Sequential:
    """3x3 convolutions of stride 2, each with a norm and a ReLU, up to the stride of a patch (Xiao et al., arXiv 2106.14881).

    The last has embed_dim channels, each one before half as many.

    Args:
        patch_size: a power of two from 2 on.
        in_chans: image channels.
        embed_dim: channels of the map, (B, embed_dim, H / patch_size, W / patch_size).
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ValueError: another patch size.
    """
    dd = {"device": device, "dtype": dtype}
    if patch_size < 2 or not math.log2(patch_size).is_integer():
        raise ValueError(
            f"patch_size is {patch_size}, expected a power of two from 2 on: each convolution of the stem halves"
        )
    layers: List[nn.Module] = []
    for halvings in reversed(range(int(math.log2(patch_size)))):
        channels = max(1, embed_dim // 2**halvings)
        layers += [nn.Conv2d(in_chans, channels, 3, 2, 1, bias=False, **dd), nn.BatchNorm2d(channels, **dd), nn.ReLU()]
        in_chans = channels
    return nn.Sequential(*layers)


def _stage(name: str, stride: int) -> int:
    """Which of a timm model's features lies at `stride`."""
    with torch.device("meta"):
        reductions = timm.create_model(name, features_only=True).feature_info.reduction()
    if stride not in reductions:
        raise ValueError(f"{name} has features at strides {reductions}, none at {stride}; give a patch_size among them")
    return reductions.index(stride)
