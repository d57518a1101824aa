"""What the families share in making a model: sizes, default configuration, and the call to timm's builder."""

from __future__ import annotations

from typing import Any, Callable, Dict

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, resolve_pretrained_cfg

from .trunk import VisionSSM

SIZES = {
    "nano": dict(embed_dim=96, depth=6),
    "tiny": dict(embed_dim=192, depth=24),
    "small": dict(embed_dim=384, depth=24),
    "base": dict(embed_dim=768, depth=24),
}


def default_cfg(**entries: Any) -> Dict[str, Any]:
    """Configuration of a model for ImageNet-1k at 224 px, with `entries` over it (see timm's `PretrainedCfg`)."""
    return {
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": None,
        "fixed_input_size": True,
        "interpolation": "bicubic",
        "crop_pct": 0.875,
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": "patch_embed.proj",
        "classifier": "head",
        "license": "apache-2.0",
        **entries,
    }


def create(variant: str, pretrained: bool, filter_fn: Callable, no_weights: str, **kwargs: Any) -> VisionSSM:
    """Builds a registered model, or its feature extractor with `features_only=True`.

    Args:
        variant: registered name.
        pretrained: load weights: the registered ones, or those that a configuration among `kwargs` names.
        filter_fn: turns a file's state dict into the model's.
        no_weights: why no weights are registered.
        kwargs: arguments of timm's builder and of `VisionSSM`.

    Raises:
        RuntimeError: `pretrained` where neither the registry nor the call names any weights.
        TypeError: an argument that the model does not have.
    """
    if pretrained:
        cfg = resolve_pretrained_cfg(variant, kwargs.get("pretrained_cfg"), kwargs.get("pretrained_cfg_overlay"))
        if not (cfg.has_weights or cfg.state_dict):
            raise RuntimeError(
                f"no pretrained weights for {variant}: {no_weights}. Use pretrained=False for a random start, or name "
                "your own file with pretrained_cfg_overlay=dict(file=...)"
            )
    return build_model_with_cfg(
        VisionSSM,
        variant,
        pretrained,
        pretrained_filter_fn=filter_fn,
        feature_cfg=dict(out_indices=3, feature_cls="getter"),
        **kwargs,
    )
