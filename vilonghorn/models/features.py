"""The model of `features_only=True`: timm's, with the layer groups of the model inside."""

import torch
from torch import Tensor

from ._timm import FeatureGetterNet


class Features(FeatureGetterNet):
    """Returns the maps of chosen blocks or levels of `model`, in a list."""

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """As `VisionSSM.no_weight_decay`."""
        return {f"model.{name}" for name in self.model.no_weight_decay()}  # type: ignore[operator]

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, str | list]:
        """As `VisionSSM.group_matcher`."""
        return self.model.group_matcher(coarse)  # type: ignore[operator]


class PyramidFeatures(Features):
    """`Features` of a `PyramidSSM`, which TorchScript compiles."""

    def forward(self, x: Tensor) -> list[Tensor]:
        """(B, in_chans, H, W) images to the maps of the chosen levels; the others were removed."""
        return self.model.forward_features(x)  # type: ignore[operator]
