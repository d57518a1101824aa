"""The weights that a run starts from: of another run, or of a file, in the form in which timm fits them to a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from timm.models import load_state_dict

from .checkpoint import load_weights
from .checks import reason_of
from .directory import RunDirectory

HEADS = ("head.weight", "head.fc.weight", "classifier.weight", "fc.weight")


def weights_overlay(source: str) -> dict[str, Any]:
    """What to say to `timm.create_model(pretrained=True, pretrained_cfg_overlay=...)` to start from some weights.

    timm then resamples positions and patches to the model's, and makes a new head where the classes are not as many.

    Args:
        source: the directory of a run, whose best weights are taken, or a file of weights: safetensors, or a
            checkpoint of torch, the model's weights under `model`, `state_dict` or `state_dict_ema` or bare.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is not a file of weights.
    """
    path = RunDirectory(source).weights("best") if Path(source).is_dir() else Path(source)
    if not path.is_file():
        raise FileNotFoundError(f"model.weights is {source}, but there is no {path}")
    record: dict[str, Any] = {}
    try:
        if Path(source).is_dir():
            weights, record = load_weights(path)
        else:
            weights = load_state_dict(str(path))
    except Exception as error:  # a file of another kind can raise nearly anything out of its reader
        raise ValueError(f"model.weights is {source}, which is not a file of weights ({reason_of(error)})") from error
    # Nothing of a file of weights but its names and shapes tells what it is of.
    if not weights or not all(isinstance(value, torch.Tensor) for value in weights.values()):
        raise ValueError(f"model.weights is {source}, which holds no weights but {list(weights)[:4]}")
    head = next((weights[name] for name in HEADS if name in weights), None)
    classes = {} if head is None else {"num_classes": head.shape[0]}
    size = record.get("kwargs", {}).get("img_size")
    input_size = {"input_size": (3, size, size)} if isinstance(size, int) else {}
    return {"state_dict": weights, **classes, **input_size}
