"""Feature maps at several strides out of one map, as in ViTDet (Li et al., arXiv 2203.16527).

What the map is made of, and which of the maps a task takes, is the model's affair.
"""

import math
from typing import Dict, List, Optional, Sequence, Tuple

import torch.nn.functional as F
from timm.layers import LayerNorm2d
from torch import Tensor, nn


class SimpleFeaturePyramid(nn.Module):
    """Maps at several strides out of one: ViTDet's simple feature pyramid.

    A level is a row of transposed convolutions that double the resolution and halve the channels, or a max pooling, then a
    1x1 and a 3x3 convolution, each with a norm.
    """

    strides: Dict[str, int]

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
            in_channels: channels of the map that comes in.
            out_channels: channels of every map that goes out.
            stride: pixels of the image to a position of the map that comes in.
            strides: the same of the maps that go out, which are named "0", "1", ... in this order.
            device: of the parameters.
            dtype: of the parameters.

        Raises:
            ValueError: strides that are no power of two apart.
        """
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        for out in strides:
            if not math.log2(out / stride).is_integer():
                raise ValueError(
                    f"a map at stride {stride} gives none at stride {out}: expected a power of two between them"
                )
        self.strides = {str(i): out for i, out in enumerate(strides)}
        self.levels = nn.ModuleDict(
            {name: _level(in_channels, out_channels, stride, out, **dd) for name, out in self.strides.items()}
        )

    def forward(self, x: Tensor, padded: Optional[Tuple[int, int]] = None) -> Dict[str, Tensor]:
        """
        Args:
            x: (B, in_channels, h, w), of h * stride pixels by w * stride.
            padded: pixels that the last rows and columns are padding, less than `stride`: they are cut off the maps.

        Returns:
            (B, out_channels, ceil(height / s), ceil(width / s)) for each stride s, by name.
        """
        maps: Dict[str, Tensor] = {}
        for name, level in self.levels.items():
            out = level(x)
            if padded is not None:  # F.pad, as slices to a computed end cannot be exported
                out = F.pad(out, [0, -(padded[1] // self.strides[name]), 0, -(padded[0] // self.strides[name])])
            maps[name] = out
        return maps


def _level(in_channels: int, out_channels: int, stride: int, out: int, **dd) -> nn.Sequential:
    layers: List[nn.Module] = []
    channels = in_channels
    while stride > out:
        if layers:
            layers += [LayerNorm2d(channels, **dd), nn.GELU()]
        layers.append(nn.ConvTranspose2d(channels, channels // 2, 2, stride=2, **dd))
        channels, stride = channels // 2, stride // 2
    if stride < out:
        pool = out // stride  # rounds up; not by ceil_mode, which cannot be exported
        layers += [nn.ConstantPad2d((0, pool - 1, 0, pool - 1), -math.inf), nn.MaxPool2d(pool)]
    for kernel in (1, 3):
        layers.append(nn.Conv2d(channels, out_channels, kernel, padding=kernel // 2, bias=False, **dd))
        layers.append(LayerNorm2d(out_channels, **dd))
        channels = out_channels
    return nn.Sequential(*layers)
