"""The model that an export begins with: a name, weights, and the image size that its positions are kept for."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors import SafetensorError
from timm.models import load_state_dict

from vilonghorn.engine.checkpoint import load_weights
from vilonghorn.models import VisionSSM

from .formats import SMALLEST_GRID

INITIAL = ("drop_rate", "pos_drop_rate", "drop_path_rate")  # keywords of a run that only its training needs


def build(name: str, checkpoint: Path | None = None, img_size: Sequence[int] | None = None) -> VisionSSM:
    """A model ready for export: any image size, evaluation mode, frozen float32 parameters.

    Args:
        name: a registered model of this library.
        checkpoint: weights of it: what a run leaves, whose record also tells the model's keywords, or a state dict that
            timm reads. Default: random weights.
        img_size: a side, or height and width. Default: the checkpoint's, or else the model's.

    Raises:
        ValueError: no such model, a size that does not fit it, or weights of another model.
        FileNotFoundError: no such checkpoint.
    """
    ours = [
        model
        for model in timm.list_models()
        if timm.models.model_entrypoint(model).__module__.startswith("vilonghorn.")
    ]
    if name not in ours:
        raise ValueError(f"{name} is not one of this library's models: {', '.join(ours)}")
    kwargs, overlay = {}, None
    if checkpoint is not None:
        weights, kwargs = read(name, checkpoint)
        size = kwargs.get("img_size")
        overlay = dict(state_dict=weights, num_classes=kwargs.get("num_classes", 1000))
        if size is not None:
            overlay["input_size"] = (kwargs.get("in_chans", 3), *((size, size) if isinstance(size, int) else size))
    if img_size is not None:
        if len(img_size) > 2 or min(img_size) < 1:
            raise ValueError(
                f"--img-size is {' '.join(map(str, img_size))}, expected one side, or height and width, in pixels"
            )
        kwargs = {**kwargs, "img_size": tuple(img_size) if len(img_size) == 2 else img_size[0]}
    kwargs = {**kwargs, "dynamic_img_size": True, "dynamic_img_pad": False}
    try:
        model = timm.create_model(name, pretrained=overlay is not None, pretrained_cfg_overlay=overlay, **kwargs)
    except (RuntimeError, TypeError) as error:
        if overlay is None:
            raise
        raise ValueError(
            f"{checkpoint} does not hold weights of {name}: {' '.join(str(error).split())[:300]}"
        ) from error
    if not isinstance(model, VisionSSM):
        raise ValueError(f"{name} gives a {type(model).__name__}, expected one of the plain models, which give logits")
    if model.blocks[0].mixer.learned_A:
        raise ValueError("models with learned_A=True scan by an operator of this library, and cannot be exported")
    if min(model.patch_embed.grid_size) < SMALLEST_GRID:
        raise ValueError(
            f"images of {model.patch_embed.img_size} pixels are fewer than {SMALLEST_GRID} patches high or wide"
        )
    return model.eval().float().requires_grad_(False)


def read(name: str, path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The state dict of a file, and the keywords of the model that it is of, as far as the file tells.

    Raises:
        ValueError: the file is no checkpoint, or says that it is of another model.
        FileNotFoundError: there is no such file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"--checkpoint {path}: there is no such file")
    try:
        weights = load_state_dict(str(path), use_ema=True, weights_only=True)
    except (
        SafetensorError,
        RuntimeError,
        EOFError,
        KeyError,
        ValueError,
        AttributeError,
        pickle.UnpicklingError,
    ) as error:
        raise ValueError(f"{path} is not a checkpoint that timm reads ({type(error).__name__})") from error
    try:
        _, record = load_weights(path)
    except ValueError:  # a state dict of anyone's: its shapes tell the number of classes
        classes = len(weights["head.weight"]) if "head.weight" in weights else 0
        return weights, {"num_classes": classes}
    if record.get("model") != name:
        raise ValueError(f"{path} holds weights of {record.get('model', 'no model')}, not of {name}")
    return weights, {key: value for key, value in record["kwargs"].items() if key not in INITIAL}
