"""Convolutional stem: 3x3 convolutions before the patch embedding."""

import math
from typing import Any

from timm.layers import to_2tuple
from torch import nn

from .patch_embed import PatchEmbed


class StemEmbed(PatchEmbed):
    """`PatchEmbed` of the map of a convolutional stem, by a 1x1 convolution (Xiao et al., arXiv 2106.14881).

    Each 3x3 convolution of the stem has stride 2, a norm and a ReLU, and half the channels of the next; the last has
    embed_dim. Images are padded before it, so that every size works.
    """

    def __init__(self, *args: Any, device=None, dtype=None, **kwargs: Any) -> None:
        """
        Args:
            args: of `PatchEmbed`; patch_size is a power of two, at least 2, and stride is None or equal to it.
            device: of the parameters.
            dtype: of the parameters.
            kwargs: of `PatchEmbed`.

        Raises:
            ValueError: another patch size or stride, or an image that is not a whole number of patches.
        """
        dd = {"device": device, "dtype": dtype}
        super().__init__(*args, **kwargs, **dd)  # type: ignore[misc]
        patch, in_chans, embed_dim = self.patch_size[0], self.in_chans, self.proj.out_channels
        if self.patch_size != self.stride or patch != self.patch_size[1]:
            raise ValueError(
                f"patch_size is {self.patch_size} and stride {self.stride}; a stem needs square patches without overlap"
            )
        if patch < 2 or not math.log2(patch).is_integer():
            raise ValueError(
                f"patch_size is {patch}, expected a power of two, at least 2: each convolution halves the resolution"
            )
        layers: list[nn.Module] = []
        for halvings in reversed(range(int(math.log2(patch)))):
            channels = max(1, embed_dim // 2**halvings)
            layers += [nn.Conv2d(in_chans, channels, 3, 2, 1, bias=False, **dd), nn.BatchNorm2d(channels, **dd)]
            layers += [nn.ReLU()]
            in_chans = channels
        del self.proj  # the stem comes before it in the order of parameters
        self.backbone, self.proj = nn.Sequential(*layers), nn.Conv2d(embed_dim, embed_dim, 1, **dd)

    def set_input_size(
        self, img_size: int | tuple[int, int] | None = None, patch_size: int | tuple[int, int] | None = None
    ) -> None:
        """Changes the image size, in pixels. Raises ValueError for another patch size."""
        if to_2tuple(patch_size or self.patch_size) != self.patch_size:
            raise ValueError(
                f"patch_size is {patch_size}, but the stem's is {self.patch_size[0]}: make a new model for another"
            )
        super().set_input_size(img_size)
