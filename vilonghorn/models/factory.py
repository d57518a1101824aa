"""What the families share: sizes, default configuration, and the making and registering of their models."""

from __future__ import annotations

import sys
from typing import Any, Callable, Dict, NamedTuple, Type

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model, resolve_pretrained_cfg

from .pyramid import PyramidSSM
from .trunk import VisionSSM

SIZES = {
    "nano": dict(embed_dim=96, depth=6),
    "tiny": dict(embed_dim=192, depth=24),
    "small": dict(embed_dim=384, depth=24),
    "base": dict(embed_dim=768, depth=24),
}
STRIDE8 = ("tiny", "small")  # the sizes that Vim's authors fine-tuned on overlapping patches
PYRAMID_CHANNELS = {
    "nano": 64,
    "tiny": 128,
    "small": 256,
    "base": 256,
}  # 256 as in ViTDet, fewer where the trunk is narrow


class Variant(NamedTuple):
    """What a registered name stands for."""

    model: Type[VisionSSM]
    args: Dict[str, Any]  # of the model, which the caller's override


def variants(family: str, forms: Dict[str, Dict[str, Any]]) -> Dict[str, Variant]:
    """A family's models: every form in every size, on overlapping patches, and with a feature pyramid.

    Args:
        family: first part of the names.
        forms: suffix of a name to the arguments that make the form.

    Returns:
        Name, such as "vilonghorn_tiny_exact_stride8" or "vilonghorn_tiny_sfp", to model.
    """
    plain = {(size, form): {**SIZES[size], **args} for form, args in forms.items() for size in SIZES}
    models = {f"{family}_{size}{form}": Variant(VisionSSM, args) for (size, form), args in plain.items()}
    for (size, form), args in plain.items():
        if size in STRIDE8:
            models[f"{family}_{size}{form}_stride8"] = Variant(VisionSSM, {**args, "stride": 8})
        pyramid = {**args, "pyramid_channels": PYRAMID_CHANNELS[size]}
        models[f"{family}_{size}{form}_sfp"] = Variant(PyramidSSM, pyramid)
    return models


def register(module: str, models: Dict[str, Variant], filter_fn: Callable, no_weights: str) -> None:
    """Makes an entrypoint of each model in a family's module, and registers it with timm.

    Args:
        module: name of the family's module, which has `default_cfgs`.
        models: of `variants`.
        filter_fn: turns a file's state dict into the model's.
        no_weights: what `pretrained=True` says of models that have no weights.
    """
    for name, variant in models.items():
        entrypoint = _entrypoint(name, variant, filter_fn, no_weights)
        entrypoint.__module__, entrypoint.__name__, entrypoint.__qualname__ = module, name, name
        setattr(sys.modules[module], name, register_model(entrypoint))


def _entrypoint(name: str, variant: Variant, filter_fn: Callable, no_weights: str) -> Callable[..., VisionSSM]:
    def entrypoint(pretrained: bool = False, **kwargs: Any) -> VisionSSM:
        return create(name, variant.model, pretrained, filter_fn, no_weights, **{**variant.args, **kwargs})

    arguments = ", ".join(f"{key}={value!r}" for key, value in variant.args.items())
    entrypoint.__doc__ = f"`{variant.model.__name__}` with {arguments}."
    return entrypoint


def default_cfgs(models: Dict[str, Variant], published: Dict[str, Dict[str, Any]]) -> Dict[str, Any]:
    """Configurations of a family's models, as timm keeps them.

    Args:
        models: of `variants`.
        published: tagged name, such as "vim_tiny.in1k", to what its configuration says of its weights. A model with a
            pyramid begins with those of the model without.
    """
    cfgs = {}
    for name, variant in models.items():
        pyramid = dict(num_classes=0, fixed_input_size=False) if variant.model is PyramidSSM else {}
        tags = {
            tagged: weights
            for tagged, weights in published.items()
            if tagged.split(".")[0] == name.removesuffix("_sfp")
        }
        for tagged, weights in tags.items():
            cfgs[f"{name}.{tagged.split('.')[1]}"] = default_cfg(**weights, **pyramid)
        if not tags:
            cfgs[name] = default_cfg(**pyramid)
    return generate_default_cfgs(cfgs)


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


def create(
    variant: str, model: Type[VisionSSM], pretrained: bool, filter_fn: Callable, no_weights: str, **kwargs: Any
) -> VisionSSM:
    """Builds a registered model, or its feature extractor with `features_only=True`.

    Args:
        variant: registered name.
        model: its class.
        pretrained: load weights: the registered ones, or those that a configuration among `kwargs` names.
        filter_fn: turns a file's state dict into the model's.
        no_weights: why no weights are registered.
        kwargs: arguments of timm's builder and of the model.

    Raises:
        RuntimeError: `pretrained` where neither the registry nor the call names any weights.
        TypeError: an argument that the model does not have.
        ValueError: weights that do not fit the model.
    """
    if pretrained:
        cfg = resolve_pretrained_cfg(variant, kwargs.get("pretrained_cfg"), kwargs.get("pretrained_cfg_overlay"))
        if not (cfg.has_weights or cfg.state_dict):
            raise RuntimeError(
                f"no pretrained weights for {variant}: {no_weights}. Use pretrained=False for a random start, or name "
                "your own file with pretrained_cfg_overlay=dict(file=...)"
            )
    return build_model_with_cfg(
        model,
        variant,
        pretrained,
        pretrained_filter_fn=filter_fn,
        feature_cfg=dict(out_indices=model.num_default_features, feature_cls="getter"),
        **kwargs,
    )
