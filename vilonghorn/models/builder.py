"""Sizes of the plain models; default configurations, construction and feature extractors of all registered models."""

from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from timm.data import IMAGENET_INCEPTION_MEAN, IMAGENET_INCEPTION_STD
from timm.layers import is_exportable
from timm.models import build_model_with_cfg, resolve_pretrained_cfg
from timm.models._features import FeatureGetterNet

from ..layers.exportable import make_exportable
from ._transformers import keep_names
from .fit_weights import checkpoint_filter_fn
from .hierarchy import HierarchicalSSM
from .trunk import VisionSSM
from .weights_file import check_file

NANO: dict[str, Any] = dict(embed_dim=96, depth=6)
TINY = dict(embed_dim=192, depth=24)
SMALL = dict(embed_dim=384, depth=24)
BASE = dict(embed_dim=768, depth=24)
PATCH8 = dict(patch_size=8, global_pool="avg")  # for small images

WEIGHTS = Path(__file__).parents[1] / "weights"
ICON_NAMES = tuple((WEIGHTS / "icons480.txt").read_text(encoding="utf-8").splitlines())  # of the classes

Model = TypeVar("Model", bound=VisionSSM | HierarchicalSSM)


def default_cfg(**entries: Any) -> dict[str, Any]:
    """Configuration of a model for ImageNet-1k at 224 px, timm's default (`PretrainedCfg`), updated by `entries`."""
    ours = dict(fixed_input_size=True, first_conv="patch_embed.proj", classifier="head", license="apache-2.0")
    return ours | entries


def icons_cfg(name: str, **entries: Any) -> dict[str, Any]:
    """Configuration of weights in this package, trained on icons at 64 px: docs/models/icons480.md."""
    return default_cfg(
        file=str(WEIGHTS / f"{name}.icons480.safetensors"),
        num_classes=480,
        label_names=ICON_NAMES,
        input_size=(3, 64, 64),
        crop_pct=1.0,
        mean=IMAGENET_INCEPTION_MEAN,
        std=IMAGENET_INCEPTION_STD,
        **entries,
    )


def build_model(model_cls: type[Model], variant: str, pretrained: bool, kwargs: dict[str, Any]) -> Model:
    """Builds a registered model, or its feature extractor with `features_only=True`.

    Args:
        model_cls: class of the model.
        variant: registered name.
        pretrained: load the registered weights, or those that a configuration in `kwargs` names.
        kwargs: arguments of timm's builder and of the model.

    Raises:
        RuntimeError: `pretrained` where neither the registry nor the call names weights.
        TypeError: an argument that the model does not have.
        ValueError: weights that do not fit the model or are damaged, an `output_stride` other than 32, or another
            `feature_cls` than "getter".
    """
    if (output_stride := kwargs.pop("output_stride", 32)) != 32:
        raise ValueError(
            f"output_stride is {output_stride}, expected 32: {variant} does not dilate its stages; take maps at "
            "strides 4 to 32 of vilonghornv2_tiny, and a decoder of them, such as smp's Unet or UPerNet"
        )
    is_extractor = bool(kwargs.get("features_only"))
    if is_extractor:
        keep_names()
        if kwargs.get("feature_cls") not in (None, "getter"):
            raise ValueError(f"feature_cls is {kwargs['feature_cls']!r}, expected 'getter': others have no NCHW maps")
        kwargs.pop("feature_cls", None)
    if pretrained:
        cfg = resolve_pretrained_cfg(variant, kwargs.get("pretrained_cfg"), kwargs.get("pretrained_cfg_overlay"))
        if not (cfg.has_weights or cfg.state_dict):
            raise RuntimeError(
                f"no pretrained weights for {variant}: none are published yet. Use pretrained=False for random "
                "weights, or name your own file with pretrained_cfg_overlay=dict(file=...)"
            )
        if cfg.file and not cfg.state_dict:
            check_file(cfg.file)
    model: Any = build_model_with_cfg(
        model_cls,
        variant,
        pretrained,
        pretrained_filter_fn=partial(checkpoint_filter_fn, with_head=not is_extractor),
        feature_cfg=dict(out_indices=model_cls.num_default_features, feature_cls=Features),
        **kwargs,
    )
    if is_exportable():
        make_exportable(model)
    return model


class Features(FeatureGetterNet):
    """Returns the maps of chosen blocks or stages of `model`, in a list: timm's, with layer groups and weight decay."""

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """As `VisionSSM.no_weight_decay`."""
        return {f"model.{name}" for name in self.model.no_weight_decay()}  # type: ignore[operator]

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """As `Backbone.set_grad_checkpointing`."""
        self.model.set_grad_checkpointing(enable)  # type: ignore[operator]

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, str | list]:
        """As `VisionSSM.group_matcher`."""
        return self.model.group_matcher(coarse)  # type: ignore[operator]
