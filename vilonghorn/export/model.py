"""Makes the model that is exported, from a name, a checkpoint and an image size."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from timm.layers import to_2tuple
from timm.models import load_state_dict, model_entrypoint
from timm.models._features import FeatureGetterNet

from ..engine import load_config
from ..engine.build import one_line
from ..engine.checkpoint import RunDirectory, load_weights
from ..inference import preprocessing, read_record
from ..models import PyramidSSM, VisionSSM
from ..models.weights import unwrap
from .formats import min_grid, trunk


def load_for_export(
    name: str | Path,
    checkpoint: str | Path | None = None,
    img_size: Sequence[int] | None = None,
    features: Sequence[int] | None = None,
) -> VisionSSM | FeatureGetterNet:
    """Makes a model for any image size, in evaluation mode, with frozen float32 parameters.

    Args:
        name: directory of a run, or a registered model of this library; with a tag, its pretrained weights.
        checkpoint: of a run "best" (default) or "last"; of a model weights of a run, whose record has the model's
            arguments, or a state dict that timm reads. Default: those of the tag, or random weights.
        img_size: side, or height and width, of the position embedding. Default: the checkpoint's, or else the model's.
        features: blocks, or levels of a pyramid, whose maps the model returns in a list, in place of logits, as with
            timm's `features_only=True, out_indices=features`; an empty list for the model's default. Default: logits.

    Raises:
        ValueError: unknown model, a size or an index that does not fit it, weights of another model, or a pyramid
            without classes whose features are not asked for.
        FileNotFoundError: there is no such checkpoint.
    """
    name, config = str(name), {}
    if Path(name).is_dir():
        name, checkpoint, config = _find_in_run(name, str(checkpoint or "best"))
    ours = [m for m in timm.list_models() if model_entrypoint(m).__module__.startswith("vilonghorn.")]
    base, _, tag = name.partition(".")
    if base not in ours:
        raise ValueError(
            f"{name} is neither the directory of a run nor one of this library's models: {', '.join(ours)}"
        )
    weights, kwargs, classes = (None, {}, None) if checkpoint is None else _read_checkpoint(base, Path(checkpoint))
    overlay = config | dict(label_names=classes, state_dict=weights, num_classes=kwargs.get("num_classes", 1000))
    if "img_size" in kwargs:
        overlay["input_size"] = (kwargs.get("in_chans", 3), *to_2tuple(kwargs["img_size"]))
    if img_size is not None:
        if len(img_size) > 2 or min(img_size) < 1:
            raise ValueError(f"--img-size is {img_size}, expected one side, or height and width, in pixels")
        kwargs["img_size"] = (img_size[0], img_size[-1])
    if weights is not None:
        kwargs |= dict(pretrained=True, pretrained_cfg_overlay=overlay)
    elif tag:
        kwargs |= dict(pretrained=True)
    kwargs |= dict(dynamic_img_size=True, dynamic_img_pad=False)
    if features is not None:
        kwargs |= dict(features_only=True) | (dict(out_indices=tuple(features)) if features else {})
    try:
        model = timm.create_model(name, **kwargs)
    except (RuntimeError, TypeError) as error:
        if weights is not None:
            raise ValueError(f"{checkpoint} does not hold weights of {name} ({one_line(error)[:300]})") from error
        if tag:
            raise ValueError(f"{name}: {error}") from error
        raise
    except AssertionError as error:  # of timm, for an index
        raise ValueError(f"--features is {list(features or ())}: {error}") from error
    indices = list(model.out_indices) if isinstance(model, FeatureGetterNet) else []
    if indices != sorted(set(indices)):
        raise ValueError(
            f"--features is {features}, expected different indices in ascending order, as maps are returned"
        )
    if isinstance(model, PyramidSSM) and model.num_classes == 0:
        raise ValueError(f"{name} has no classes, and would return a pooled vector: give --features for its maps")
    embed, least = trunk(model).patch_embed, min_grid(model)
    if min(embed.grid_size) < least:
        size = embed.img_size
        raise ValueError(
            f"images of {size} pixels are fewer than {least} patches high or wide: give a larger --img-size"
        )
    return model.eval().float().requires_grad_(False)


def _find_in_run(run: str, which: str) -> tuple[str, Path, dict[str, Any]]:
    """The model, the file of weights and the preprocessing of a run."""
    if which not in ("best", "last"):
        raise ValueError(f"--checkpoint is {which!r}, expected best or last: {run} is the directory of a run")
    path = RunDirectory(run).weights(which)
    _, record = load_weights(path, tensors=False)
    return record.get("model", ""), path, preprocessing(load_config(Path(run) / "config.yaml").data)


def _read_checkpoint(name: str, path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any], list[str] | None]:
    """Reads a state dict, and the arguments of its model and the names of its classes as far as the file has them."""
    if not path.is_file():
        raise FileNotFoundError(f"--checkpoint is {path}, expected a file; of a run, give the directory as MODEL")
    try:
        weights = load_state_dict(str(path), use_ema=True, weights_only=True)
    except Exception as error:  # a reader can raise almost anything on a file of another kind
        raise ValueError(f"{path} is not a checkpoint that timm reads ({type(error).__name__})") from error
    try:
        weights = unwrap(weights)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    record = read_record(path, name)
    if "kwargs" not in record:  # not of a run of this library; the head has a row for each class
        head = weights.get("head.weight")
        return weights, {"num_classes": 0 if head is None or head.dim() == 0 else len(head)}, None
    return weights, record["kwargs"], record.get("class_names")
