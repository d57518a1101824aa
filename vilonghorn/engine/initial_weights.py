"""The weights that a run starts from: found on this machine or downloaded, read, and what of them is loaded."""

import os
import warnings
from pathlib import Path
from typing import Any

import timm
import torch
from huggingface_hub import hf_hub_download, try_to_load_from_cache
from timm.layers import to_ntuple
from torch import nn

from ..data.image_folder import shorten
from ..models.vim import CHANGES, is_from_mamba
from ..models.weights_file import one_line, read_weights, recorded_input_size
from .checkpoint import RunDirectory
from .config import Config
from .distributed import Distributed

DOWNLOAD_REMEDY = "download the file elsewhere and give it by model.weights"


def find_weights(model: str) -> str | None:
    """The file of published weights of a model in this package or the caches of torch and the Hub; None: none there."""
    if (cfg := timm.get_pretrained_cfg(model)) is None:
        return None
    hub = cfg.hf_hub_id and try_to_load_from_cache(cfg.hf_hub_id, cfg.hf_hub_filename or "model.safetensors")
    url = cfg.url and os.path.join(torch.hub.get_dir(), "checkpoints", os.path.basename(cfg.url))
    return next((file for file in (cfg.file, hub, url) if isinstance(file, str) and os.path.isfile(file)), None)


def download_weights(source: str) -> str:
    """The file of `hf:NAME`, a model of timm or a repository OWNER/NAME, downloaded if it is not on this machine."""
    name = source.removeprefix("hf:")
    if file := find_weights(name):
        return file
    cfg = timm.get_pretrained_cfg(name)
    repository, file = (name, None) if "/" in name else (cfg and cfg.hf_hub_id, cfg and cfg.hf_hub_filename)
    if not repository:
        raise ValueError(f"model.weights is {source}, but timm knows no weights of {name} on the Hub: give OWNER/NAME")
    try:
        return hf_hub_download(repository, file or "model.safetensors")
    except (OSError, ValueError) as error:
        what = f"model.weights is {source}, which cannot be downloaded ({one_line(error)})"
        raise OSError(f"{what}: {DOWNLOAD_REMEDY}") from error


def read_initial_weights(model: str, source: str) -> dict[str, Any]:
    """Reads `model.weights` as an argument of `timm.create_model(pretrained=True, pretrained_cfg_overlay=...)`."""
    path = Path(download_weights(source) if source.startswith("hf:") else source)
    path = RunDirectory(path).weights("best") if path.is_dir() else path
    try:
        weights, record = read_weights(path)
    except ValueError as error:
        raise ValueError(f"model.weights is {source}, which cannot be read: {error}") from error
    if not weights or not all(isinstance(value, torch.Tensor) for value in weights.values()):
        raise ValueError(f"model.weights is {source}, which contains no tensors; found keys {list(weights)[:4]}")
    if (cfg := timm.get_pretrained_cfg(model.partition(".")[0])) is None:
        problem = f"but {model} has no default_cfgs, which name its classifier"
        raise ValueError(f"model.weights is {source}, {problem}: register the model with default_cfgs")
    head = weights.get(f"{to_ntuple(1)(cfg.classifier)[0]}.weight")
    if head is not None and not head.dim():
        raise ValueError(f"model.weights is {source}, whose classifier is a single number, expected a matrix")
    record = record or {}
    trained = {key: value for key, value in record.get("data", {}).items() if key in ("mean", "std")}
    found = {"state_dict": weights, "num_classes": 0 if head is None else head.shape[0]}
    return found | recorded_input_size(record.get("kwargs", {})) | trained


def describe_loaded(model: nn.Module, fresh: nn.Module, name: str, source: str, weights: dict[str, Any]) -> str:
    """A sentence on how many tensors of a model are from `weights`, and which are new; ValueError if all are."""
    # timm skips what does not fit, and does not say what. Loading writes in place, which torch counts; not in `fresh`.
    pairs = zip(model.named_parameters(), fresh.parameters())
    total, new = len([*fresh.parameters()]), [name for (name, p), q in pairs if p._version == q._version]
    if len(new) == total:
        remedy = f"give weights of {name}, which has {shorten(new)}; these have {shorten([*weights])}"
        raise ValueError(f"model.weights is {source}, but none of its tensors fits {name}: {remedy}")
    rest = f"; new: {shorten(new)}" if new else ""
    rest += f"; {CHANGES}" if is_from_mamba(weights, model) else ""
    return f"model.weights: {total - len(new)} of {total} tensors are from {source}{rest}"


def check_normalization(config: Config, given: dict[str, Any]) -> None:
    """Warns if the weights were trained on images normalised in another way: published weights, or those of a run.

    `given` is what `read_initial_weights` returned, empty without `model.weights`.
    """
    model, weights = config.model, str(config.model.weights)
    is_published = model.pretrained or weights.startswith("hf:") or (weights == "auto" and given)
    name = weights.removeprefix("hf:") if weights.startswith("hf:") else model.name
    cfg = timm.get_pretrained_cfg(name) if is_published else None
    name, trained = (weights, given) if cfg is None else (name, {"mean": list(cfg.mean), "std": list(cfg.std)})
    for key in ("mean", "std") if Distributed().is_main else ():
        if (own := list(getattr(config.data, key))) != trained.get(key, own):
            what = f"data.{key} is {own}, but the weights of {name} were trained with {trained[key]}"
            warnings.warn(f"{what}: give --data.{key} '{trained[key]}'", stacklevel=3)
