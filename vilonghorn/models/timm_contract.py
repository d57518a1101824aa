"""What the architectures share: the base class, default configurations, and making a registered model."""

from collections.abc import Callable
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from timm.data import IMAGENET_INCEPTION_MEAN, IMAGENET_INCEPTION_STD
from timm.layers import is_exportable, trunc_normal_
from timm.models import build_model_with_cfg, resolve_pretrained_cfg
from timm.models._features import FeatureGetterNet, feature_take_indices
from torch import nn

from ..layers.exportable import make_exportable
from .weights_file import check_file, keep_names_in_transformers

NO_DECAY = ("pos_embed", "cls_token", "mask_token", "A_log", "D", "dt_bias", "conv_bias", "scan_norm")
WEIGHTS = Path(__file__).parents[1] / "weights"
ICON_NAMES = tuple((WEIGHTS / "icons480.txt").read_text(encoding="utf-8").splitlines())  # of the classes


class Backbone(nn.Module):
    """Base class of the architectures: what timm's contract asks of both, and their geometry.

    The features of a model are the outputs of the children of one module, `feature_layers`.
    """

    feature_layers: str  # "blocks" or "stages"
    classifier: str  # name of the last layer
    takes_pixel_mask = False  # whether features of images in a padded batch can leave the padding out
    if TYPE_CHECKING:
        norm: nn.Module
        head: Any
        mask_token: nn.Parameter | None
        feature_info: list[dict[str, Any]]
        in_chans: int
        num_classes: int
        global_pool: str
        num_prefix_tokens: int

    @torch.jit.ignore
    def init_weights(self, needs_reset: bool = True) -> None:
        """Initialises the model, also after `to_empty`; `needs_reset`: also the layers that initialise themselves."""
        if needs_reset:
            # Children first: a mixer re-initialises its linear layers.
            self.apply(lambda module: getattr(module, "reset_parameters", lambda: None)())
        self._init_embedding()
        if self.mask_token is not None:
            trunc_normal_(self.mask_token, std=0.02)
        self._init_head()

    def _init_embedding(self) -> None:
        """Initialises what precedes the blocks, if it does not initialise itself."""

    def _init_head(self) -> None:
        head = self.get_classifier()
        if isinstance(head, nn.Linear):
            trunc_normal_(head.weight, std=0.02)
            nn.init.zeros_(head.bias)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Names of the parameters without weight decay, whatever their shape."""
        return {name for name, _ in self.named_parameters() if name.rsplit(".", 1)[-1] in NO_DECAY}

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Keeps only the input of each block, and computes the block again in backward."""
        for module in self.modules():
            if hasattr(module, "grad_checkpointing"):
                module.grad_checkpointing = enable  # type: ignore[assignment]

    def get_classifier(self) -> nn.Module:
        """The last layer, from features to logits."""
        return self.get_submodule(self.classifier)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replaces the head by a new one with the model's device, dtype and mode; with 0 classes by none.

        Without `global_pool` the pooling stays. Raises ValueError for an unknown one (`VisionLonghorn` timm's
        AssertionError).
        """
        pool = self.global_pool if global_pool is None else global_pool
        self._make_head(num_classes, pool)
        self.num_classes, self.global_pool = num_classes, pool
        self.head.train(self.training)
        self._init_head()

    def _make_head(self, num_classes: int, pool: str) -> None:
        """Makes a head on the model's device."""
        raise NotImplementedError

    def patches(self, block: int | None = None) -> tuple[tuple[int, int], tuple[int, int]]:
        """Pixels from a patch to the next, and of a patch, in height and width, in a block or at the end."""
        raise NotImplementedError

    def grid_size(self, img_size: int | tuple[int, int] | None = None, block: int | None = None) -> tuple[int, int]:
        """Rows and columns of `patches` of an image, padding included. Default: of the model's image size."""
        raise NotImplementedError

    def image_size(self, rows: int, columns: int, block: int | None = None) -> tuple[int, int]:
        """Height and width, in pixels, of an image of `rows` x `columns` patches, as of `patches`."""
        (dy, dx), (height, width) = self.patches(block)
        return (rows - 1) * dy + height, (columns - 1) * dx + width

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Removes the layers that the chosen features do not need, and the final norm or the head and the pooling.

        `indices` are blocks or stages to keep features of: the last n if an int. Returns them, counted from 0.
        """
        layers = getattr(self, self.feature_layers)
        take_indices, max_index = feature_take_indices(len(layers), indices)
        setattr(self, self.feature_layers, layers[: max_index + 1])
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return take_indices


class Features(FeatureGetterNet):
    """Returns the maps of chosen blocks or stages of `model`, in a list: timm's, with layer groups and weight decay."""

    no_weight_decay = Backbone.no_weight_decay
    set_grad_checkpointing = Backbone.set_grad_checkpointing

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, str | list]:
        """As the model's."""
        return self.model.group_matcher(coarse)  # type: ignore[operator]


def packaged_cfg(name: str, size: int, num_classes: int) -> dict[str, Any]:
    """Entries of the configuration of weights in this package, trained on images of `size` px; 0 classes: no head."""
    images = dict(input_size=(3, size, size), crop_pct=1.0, mean=IMAGENET_INCEPTION_MEAN, std=IMAGENET_INCEPTION_STD)
    return dict(file=str(WEIGHTS / f"{name}.safetensors"), num_classes=num_classes, **images)


def icons_cfg(name: str) -> dict[str, Any]:
    """Those of weights that were trained on icons: docs/models/icons480.md."""
    return packaged_cfg(f"{name}.icons480", 64, len(ICON_NAMES)) | dict(label_names=ICON_NAMES)


Model = TypeVar("Model", bound=Backbone)


def build_backbone(
    model_cls: type[Model], filter_fn: Callable, out_indices: int | None, variant: str, pretrained: bool, kwargs: dict
) -> Model:
    """Builds a registered model, or with `features_only=True` its feature extractor of the last `out_indices` maps.

    `filter_fn` adapts a checkpoint: (checkpoint, model, with_head) to a state dict. `kwargs` are of timm's builder and
    of the model. Weights that are damaged or do not fit are a ValueError.
    """
    if (output_stride := kwargs.pop("output_stride", 32)) != 32:
        problem = f"output_stride is {output_stride}, expected 32: {variant} does not dilate its stages"
        remedy = "take maps at strides 4 to 32 of vilonghornv2_tiny, and a decoder of them, such as UPerNet"
        raise ValueError(f"{problem}; {remedy}")
    is_extractor = bool(kwargs.get("features_only"))
    if is_extractor:
        keep_names_in_transformers()
        if kwargs.get("feature_cls") not in (None, "getter"):
            raise ValueError(f"feature_cls is {kwargs['feature_cls']!r}, expected 'getter': others have no NCHW maps")
        kwargs.pop("feature_cls", None)
    own, timms = (signature(made).parameters.keys() for made in (model_cls, build_model_with_cfg))
    if unknown := kwargs.keys() - own - timms - {"features_only", "out_indices" if is_extractor else ""}:
        raise TypeError(f"{variant} has no argument {', '.join(sorted(unknown))}, expected some of {', '.join(own)}")
    cfg = resolve_pretrained_cfg(variant, kwargs.get("pretrained_cfg"), kwargs.get("pretrained_cfg_overlay"))
    if cfg.input_size:  # timm does this for models with fixed_input_size only
        kwargs.setdefault("img_size", cfg.input_size[-2:])
    if pretrained:
        if not (cfg.has_weights or cfg.state_dict):
            remedy = "pretrained=False for random ones, or name your file with pretrained_cfg_overlay=dict(file=...)"
            raise RuntimeError(f"no pretrained weights for {variant}: none are published yet. Use {remedy}")
        if cfg.file and not cfg.state_dict:
            check_file(cfg.file)
    model: Any = build_model_with_cfg(
        model_cls,
        variant,
        pretrained,
        pretrained_filter_fn=partial(filter_fn, with_head=not is_extractor),
        feature_cfg=dict(out_indices=out_indices, feature_cls=Features),
        **kwargs,
    )
    if is_extractor:  # the maps have the order of the layers, each once
        model.feature_info.out_indices = sorted(set(model.out_indices))
    if is_exportable():
        make_exportable(model)
    return model
