"""What the families share: sizes, default configuration, and the making and registering of their models."""

from __future__ import annotations

import sys
from typing import Any, Callable, Dict

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, register_model, resolve_pretrained_cfg

from .trunk import VisionSSM

SIZES = {
    "nano": dict(embed_dim=96, depth=6),
    "tiny": dict(embed_dim=192, depth=24),
    "small": dict(embed_dim=384, depth=24),
    "base": dict(embed_dim=768, depth=24),
}
STRIDE8 = ("tiny", "small")  # the sizes that Vim's authors fine-tuned on overlapping patches


def variants(family: str, forms: Dict[str, Dict[str, Any]]) -> Dict[str, Dict[str, Any]]:
    """Names and arguments of a family's models: every form in every size, and on overlapping patches.

    Args:
        family: first part of the names.
        forms: suffix of a name to the arguments that make the form.

    Returns:
        Name, such as "vilonghorn_tiny_exact_stride8", to arguments of `VisionSSM`.
    """
    plain = {f"{family}_{size}{form}": {**SIZES[size], **args} for form, args in forms.items() for size in SIZES}
    dense = {f"{name}_stride8": {**args, "stride": 8} for name, args in plain.items() if name.split("_")[1] in STRIDE8}
    return {**plain, **dense}


def register(module: str, models: Dict[str, Dict[str, Any]], filter_fn: Callable, no_weights: str) -> None:
    """Makes an entrypoint of each model in a family's module, and registers it with timm.

    Args:
        module: name of the family's module, which has `default_cfgs`.
        models: name to arguments of `VisionSSM`, which the caller's arguments override.
        filter_fn: turns a file's state dict into the model's.
        no_weights: what `pretrained=True` says of models that have no weights.
    """
    for name, args in models.items():
        entrypoint = _entrypoint(name, args, filter_fn, no_weights)
        entrypoint.__module__, entrypoint.__name__, entrypoint.__qualname__ = module, name, name
        setattr(sys.modules[module], name, register_model(entrypoint))


def _entrypoint(name: str, args: Dict[str, Any], filter_fn: Callable, no_weights: str) -> Callable[..., VisionSSM]:
    def entrypoint(pretrained: bool = False, **kwargs: Any) -> VisionSSM:
        return create(name, pretrained, filter_fn, no_weights, **{**args, **kwargs})

    entrypoint.__doc__ = f"`VisionSSM` with {', '.join(f'{key}={value!r}' for key, value in args.items())}."
    return entrypoint


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
        VisionSSM,
        variant,
        pretrained,
        pretrained_filter_fn=filter_fn,
        feature_cfg=dict(out_indices=3, feature_cls="getter"),
        **kwargs,
    )
