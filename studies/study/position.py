"""`vilonghornv2_nano_position`: the hierarchy with a learned position embedding, for the study `position` only."""

import timm
import torch
import torch.nn.functional as F
from timm.models import register_model
from torch import Tensor, nn

from vilonghorn.models.vilonghornv2 import ConvStem


class PositionedStem(ConvStem):
    """A stem whose tokens have a learned position added, resized where an image has another size."""

    def __init__(self, grid_size: tuple[int, int], *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.position = nn.Parameter(torch.empty(1, self.conv2.out_channels, *grid_size))
        nn.init.trunc_normal_(self.position, std=0.02)

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        x = super().forward(x, valid)
        return x + F.interpolate(self.position, x.shape[1:3], mode="bilinear").permute(0, 2, 3, 1)


@register_model
def vilonghornv2_nano_position(pretrained: bool = False, **kwargs) -> nn.Module:
    """`vilonghornv2_nano` with a position embedding at the first stride."""
    model = timm.create_model("vilonghornv2_nano", pretrained, **kwargs)
    stride, dim = model.feature_info[0]["reduction"], model.stem.conv2.out_channels
    stem = PositionedStem(model.grid_size(block=0), model.in_chans, dim, stride, type(model.stem.norm))
    stem.load_state_dict(model.stem.state_dict(), strict=False)
    model.stem = stem
    return model
