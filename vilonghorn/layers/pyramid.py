"""Simple feature pyramid: maps at several strides from one map (ViTDet, Li et al., arXiv 2203.16527)."""

import math
from collections.abc import Sequence

import torch.nn.functional as F
from timm.layers import LayerNorm2d
from torch import Tensor, nn


class SimpleFeaturePyramid(nn.Module):
    """ViTDet's simple feature pyramid.

    A level is either transposed convolutions, each of which doubles the resolution and halves the channels, or a max
    pooling; then a 1x1 and a 3x3 convolution, each with a norm.
    """

    strides: dict[str, int]

    def __init__(
        self,
        in_channels: int,
        out_channels: int = 256,
        stride: int = 16,
        strides: Sequence[int] = (4, 8, 16, 32),
        device=None,
        dtype=None,
    ) -> None:
        """
        Args:
            in_channels: channels of the input map.
            out_channels: channels of every output map.
            stride: stride of the input map, in pixels.
            strides: strides of the output maps, which are named "0", "1", ... in this order.
            device: of the parameters.
            dtype: of the parameters.

        Raises:
            ValueError: a ratio of strides that is not a power of two.
        """
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        self.strides = {str(i): out for i, out in enumerate(strides)}
        levels = {name: _level(in_channels, out_channels, stride, out, **dd) for name, out in self.strides.items()}
        self.levels = nn.ModuleDict(levels)

    def forward(self, x: Tensor, padded: tuple[int, int] | None = None) -> dict[str, Tensor]:
        """
        Args:
            x: (B, in_channels, h, w) map of an image of h * stride by w * stride pixels.
            padded: rows and columns of pixels that are padding, less than `stride`; they are cropped from the maps.

        Returns:
            (B, out_channels, ceil(height / s), ceil(width / s)) for each stride s, by name.
        """
        maps: dict[str, Tensor] = {}
        for name, level in self.levels.items():
            out = level(x)
            if padded is not None:  # F.pad, because slices to a computed end cannot be exported
                out = F.pad(out, [0, -(padded[1] // self.strides[name]), 0, -(padded[0] // self.strides[name])])
            maps[name] = out
        return maps


def _level(channels: int, out_channels: int, stride: int, out: int, **dd) -> nn.Sequential:
    if not math.log2(out / stride).is_integer():
        raise ValueError(f"strides are {stride} and {out}, expected a ratio that is a power of two")
    layers: list[nn.Module] = []
    while stride > out:
        if layers:
            layers += [LayerNorm2d(channels, **dd), nn.GELU()]
        layers.append(nn.ConvTranspose2d(channels, channels // 2, 2, stride=2, **dd))
        channels, stride = channels // 2, stride // 2
    if stride < out:
        pool = out // stride  # the padding below replaces ceil_mode, which cannot be exported
        layers += [nn.ConstantPad2d((0, pool - 1, 0, pool - 1), -math.inf), nn.MaxPool2d(pool)]
    for kernel in (1, 3):
        layers.append(nn.Conv2d(channels, out_channels, kernel, padding=kernel // 2, bias=False, **dd))
        layers.append(LayerNorm2d(out_channels, **dd))
        channels = out_channels
    return nn.Sequential(*layers)
