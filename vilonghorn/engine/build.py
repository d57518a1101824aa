"""Builds the parts of a run from its configuration: device, precision, loaders, model, optimizer, schedule."""

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

import timm
import torch
from huggingface_hub import hf_hub_download, try_to_load_from_cache
from timm.layers import to_ntuple
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from torch import nn

from ..data import create_loader
from ..data.images import shorten
from ..data.loaders.config import LoaderConfig
from ..data.named import is_named
from ..models.checkpoint import check_numbers, one_line, read_weights
from ..models.vim import CHANGES, is_from_mamba
from .checkpoint import RunDirectory
from .config import Config
from .distributed import Distributed

LOADER = ("epoch", "__len__", "batch_size", "num_samples", "num_classes", "class_names", "fingerprint")
DOWNLOAD_REMEDY = "download the file elsewhere and give it by model.weights"
# What models raise if they do not support their arguments or images.
MODEL_ERRORS = (TypeError, ValueError, RuntimeError, AssertionError, AttributeError, KeyError, IndexError)


@contextmanager
def explain_model_errors(problem: str, remedy: str = "") -> Iterator[None]:
    """Turns `MODEL_ERRORS` into a ValueError that says the problem, the error and the remedy."""
    try:
        yield
    except MODEL_ERRORS as error:
        end = f": {remedy}" if remedy else ""
        raise ValueError(f"{problem} ({one_line(error)}){end}") from error


def pick_device(name: str, option: str = "run.device") -> torch.device:
    """The device of a name; "auto" is CUDA if it is there, else the CPU, as no kernel runs elsewhere.

    Each process has its own GPU. Errors name the `option` that gave the device.
    """
    dist = Distributed()
    try:
        auto = "cuda" if torch.cuda.is_available() else "cpu"
        device = torch.device(auto if name == "auto" else name)
        if device.type == "cuda" and dist.local_size > 1:
            if name not in ("auto", "cuda"):
                raise ValueError(f"{option} is {name!r} for {dist.local_size} processes: make it auto or cuda")
            device = torch.device("cuda", dist.local_rank)
            torch.cuda.set_device(device)
        torch.zeros((), device=device).item()  # a device such as "meta" computes nothing
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"{option} is {name!r}, which cannot be used here: {str(error).splitlines()[0]}") from error
    return device


def autocast(amp: str, device: torch.device) -> torch.autocast:
    """The autocast context of `run.amp`; "auto" is bfloat16 on CUDA devices that support it."""
    if amp == "auto":
        amp = "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False) else "off"
    dtype = torch.float16 if amp == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype, enabled=amp != "off")


def build_loader(
    config: Config,
    device: torch.device | str,
    *,
    training: bool,
    split: Literal["train", "val"] | None = None,
    classes: Sequence[str] | None = None,
) -> Any:
    """The loader of `data.train`, augmented for training, or of `data.val`, of which each process reads a part.

    `split` is "train" to read `data.train` without augmentation, as held-out data; None: the usual one.
    `classes` are the class names by label; held-out data may lack some. None: those of the data.

    Raises FileNotFoundError if there is no such data, and the errors of `create_loader`.
    """
    data, dist = config.data, Distributed()
    split = split or ("train" if training else "val")
    key, source = f"data.{split}", getattr(data, split)
    if not (is_named(source) or Path(source).exists()):
        raise FileNotFoundError(
            f"{key} is {source}, but there is no {Path(source).absolute()}: expected a folder with one folder "
            "of images for each class, the .beton file that vilonghorn beton FOLDER FILE makes of it, "
            "hfds/NAME:SPLIT or wds/FILES"
        )
    options = {"seed": config.run.seed, "device": device, "classes": classes}
    options |= {"rank": dist.rank, "world_size": dist.world_size, "labelled": config.augmentation.labelled}
    known = {field.name for field in fields(LoaderConfig)}
    given = vars(data) | (vars(config.augmentation) if training else {})
    return create_loader(source, training=training, **{k: v for k, v in given.items() if k in known} | options)


def check_loader(config: Config, name: str, loader: Any, device: torch.device) -> None:
    """Checks a loader that `Trainer` is given as `name`, train or val.

    Raises ValueError if it lacks what a run reads of it, or with `teacher.cache` has other images than `data.train`.
    """
    is_cached = config.teacher.cache and name == "train"
    if missing := [key for key in (*LOADER, *("data", "set_targets") * is_cached) if not hasattr(loader, key)]:
        expected = "expected a loader of vilonghorn.data.create_loader, or one with its attributes"
        raise ValueError(f"{name} is a {type(loader).__name__} without {', '.join(missing)}: {expected}")
    if is_cached:
        source = build_loader(config, device, training=False, split="train", classes=loader.class_names)
        if source.fingerprint != loader.fingerprint:
            found = f"{source.fingerprint}, but that of the loader is {loader.fingerprint}"
            raise ValueError(f"the fingerprint of data.train ({config.data.train}) is {found}: give the same data")


def check_classes(name: str, num_classes: int, val: str, loader: Any) -> None:
    """Raises ValueError if held-out data has more or fewer classes than the training data or the model `name`.

    Warns if both are the same data.
    """
    if loader.num_classes != num_classes:
        same = "training and held-out data need the same"
        raise ValueError(f"{name} has {num_classes} classes but {val} has {loader.num_classes}: {same}")
    if Distributed().is_main and os.path.realpath(name) == os.path.realpath(val):
        warnings.warn(f"{val} is data.train, too: the results are not of held-out images", stacklevel=2)


def model_kwargs(config: Config, num_classes: int) -> dict[str, Any]:
    """The arguments of the model, with `img_size` if its input size is fixed. Checks `model.num_classes`."""
    model = config.model
    if model.num_classes not in (None, num_classes):
        remedy = "make them equal, or leave model.num_classes null"
        raise ValueError(f"model.num_classes is {model.num_classes} but the data has {num_classes} classes: {remedy}")
    cfg = timm.get_pretrained_cfg(model.name.partition(".")[0])
    size = {"img_size": config.data.image_size} if cfg is not None and cfg.fixed_input_size else {}
    drop_path = {} if model.drop_path is None else {"drop_path_rate": model.drop_path}
    mask_token = {} if config.augmentation.mask_ratio is None else {"mask_token": True}
    return {"num_classes": num_classes, **size, **drop_path, **mask_token, **model.kwargs}


def build_model(config: Config, num_classes: int) -> nn.Module:
    """The model with its initial weights, on the CPU.

    Raises:
        FileNotFoundError: there is no file `model.weights`.
        OSError: the published weights cannot be downloaded.
        ValueError: the model rejects its arguments or weights, or `model.num_classes` is not that of the data.
    """
    name, kwargs = config.model.name, model_kwargs(config, num_classes)
    weights = config.model.weights
    if weights == "auto" and (weights := None if config.model.pretrained else find_weights(name)) is None:
        if Distributed().is_main and not config.model.pretrained:
            print(f"model.weights: random, because no weights of {name} are on this machine", flush=True)
    check_numbers(name, kwargs, "the configuration")
    init = {} if weights is None else {"pretrained_cfg_overlay": init_weights(name, weights)}
    try:
        model = timm.create_model(name, pretrained=config.model.pretrained or bool(init), **kwargs, **init)
    except (*MODEL_ERRORS, ZeroDivisionError) as error:
        remedy = "; set model.weights to null for random weights" if init and config.model.weights == "auto" else ""
        raise ValueError(f"timm cannot make {name} with {kwargs} ({one_line(error)}){remedy}") from error
    except OSError as error:
        what = f"the published weights of {name} cannot be downloaded ({one_line(error)})"
        raise OSError(f"{what}: {DOWNLOAD_REMEDY}") from error
    if weights is not None:
        with torch.random.fork_rng(devices=[]):
            fresh = timm.create_model(name, **kwargs)
        # timm skips what does not fit, and does not say what. Loading writes in place, which torch counts.
        pairs = zip(model.named_parameters(), fresh.parameters())
        total, new = len([*fresh.parameters()]), [name for (name, p), q in pairs if p._version == q._version]
        if len(new) == total:
            raise ValueError(f"model.weights is {weights}, but none of its tensors fits {name}: give weights of {name}")
        if Distributed().is_main:
            rest = f"; random: {shorten(new)}" if new else ""
            rest += f"; {CHANGES}" if is_from_mamba(init["pretrained_cfg_overlay"]["state_dict"], model) else ""
            print(f"model.weights: {total - len(new)} of {total} tensors are from {weights}{rest}", flush=True)
    _check_normalization(config, found=weights is not None)
    return model


def _check_normalization(config: Config, found: bool) -> None:
    """Warns if published weights, of the model or of hf:NAME, were trained on images normalised in another way."""
    model, hub = config.model, str(config.model.weights).startswith("hf:")
    is_published = model.pretrained or hub or (model.weights == "auto" and found)
    name = str(model.weights).removeprefix("hf:") if hub else model.name
    if not is_published or (cfg := timm.get_pretrained_cfg(name)) is None or not Distributed().is_main:
        return
    for key, own in (("mean", list(cfg.mean)), ("std", list(cfg.std))):
        if (given := list(getattr(config.data, key))) != own:
            what = f"data.{key} is {given}, but the weights of {name} were trained with {own}"
            warnings.warn(f"{what}: give --data.{key} '{own}'", stacklevel=3)


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


def init_weights(model: str, source: str) -> dict[str, Any]:
    """Reads initial weights as an argument of `timm.create_model(pretrained=True, pretrained_cfg_overlay=...)`.

    timm resamples positions and patch embedding, and makes a new head for another number of classes. `source` is the
    directory of a run, whose best weights are read, hf:NAME, or a file that timm reads: safetensors or a torch
    checkpoint.
    """
    path = Path(download_weights(source) if source.startswith("hf:") else source)
    path = RunDirectory(path).weights("best") if path.is_dir() else path
    try:
        weights, _ = read_weights(path)
    except ValueError as error:
        raise ValueError(f"model.weights is {source}, which cannot be read: {error}") from error
    if not weights or not all(isinstance(value, torch.Tensor) for value in weights.values()):
        raise ValueError(f"model.weights is {source}, which contains no tensors; found keys {list(weights)[:4]}")
    cfg = timm.get_pretrained_cfg(model.partition(".")[0])
    if cfg is None:
        problem = f"but {model} has no default_cfgs, which name its classifier"
        raise ValueError(f"model.weights is {source}, {problem}: register the model with default_cfgs")
    head = weights.get(f"{to_ntuple(1)(cfg.classifier)[0]}.weight")
    if head is not None and not head.dim():
        raise ValueError(f"model.weights is {source}, whose classifier is a single number, expected a matrix")
    return {"state_dict": weights, "num_classes": 0 if head is None else head.shape[0]}


def image_sizes(config: Config) -> list[int]:
    """The heights, and widths, of the images of a run, the largest last."""
    recipe, last = config.augmentation, config.data.image_size
    growing = range(min(config.schedule.epochs, recipe.ramp[1]))
    return sorted({last, *recipe.sizes, *(recipe.grown_size(epoch, last) for epoch in growing)})


@torch.no_grad()
def check_model(config: Config, model: nn.Module, num_classes: int, device: torch.device) -> None:
    """Raises ValueError if a model does not turn images of every size in the run into class scores."""
    name, kwargs, training, last = config.model.name, config.model.kwargs, model.training, config.data.image_size
    for size in image_sizes(config):
        expected = f"{name} with {kwargs} does not turn images (2, 3, {size}, {size}) into scores (2, {num_classes})"
        smaller = "augmentation.sizes" if config.augmentation.sizes else "augmentation.start_size"
        remedy = f"change {'data.image_size' if size == last else smaller} or model.kwargs"
        remedy += " (dynamic_img_pad: true takes any size; vilonghorn_* and vim_* need dynamic_img_size: true, too)"
        try:
            with explain_model_errors(expected, remedy), autocast(config.run.amp, device):
                scores = model.eval()(torch.zeros(2, 3, size, size, device=device))
        finally:
            model.train(training)
        found = tuple(scores.shape) if isinstance(scores, torch.Tensor) else f"a {type(scores).__name__}"
        if found != (2, num_classes):
            raise ValueError(f"{expected} but into {found}: change model.name or model.kwargs")
    if training and config.data.batch_size == 1:  # batch norm may need two values for each channel
        with explain_model_errors(f"{name} cannot train on one image", "raise data.batch_size"):
            deepcopy(model)(torch.zeros(1, 3, last, last, device=device))


def scale_rates(config: Config, images: int) -> Config:
    """Scales the learning rates in proportion to the images per update (Goyal et al., 2017, arXiv 1706.02677)."""
    optimizer, schedule = config.optimizer, config.schedule
    factor = images / optimizer.lr_batch if optimizer.lr_batch else 1.0
    rates = replace(schedule, warmup_lr=schedule.warmup_lr * factor, min_lr=schedule.min_lr * factor)
    return replace(config, optimizer=replace(optimizer, lr=optimizer.lr * factor), schedule=rates)


def build_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer, without weight decay on vectors and on the model's `no_weight_decay()`; AdamW is fused on GPUs."""
    name = config.optimizer.name
    keys = ("lr", "weight_decay", "betas", "eps", "layer_decay", "layer_decay_min_scale")
    own = {key: getattr(config.optimizer, key) for key in keys}
    if name == "adamw" and next(model.parameters()).is_cuda:
        own["fused"] = True
    own |= config.optimizer.kwargs
    given = f" with {config.optimizer.kwargs}" if config.optimizer.kwargs else ""
    with explain_model_errors(f"optimizer.name is {name!r}, which timm cannot make{given}"):
        optimizer = create_optimizer_v2(model, name, **own)
    if getattr(optimizer, "is_second_order", False):
        raise ValueError(f"optimizer.name is {name!r}, which needs second derivatives: choose another")
    return optimizer


def build_scheduler(config: Config, optimizer: torch.optim.Optimizer, updates_per_epoch: int) -> Scheduler:
    """The schedule; `step_update(n)` sets the rate of update n, from 0."""
    schedule = config.schedule
    options = {"num_epochs": schedule.epochs, "warmup_epochs": schedule.warmup, "updates_per_epoch": updates_per_epoch}
    options |= {"warmup_lr": schedule.warmup_lr, "min_lr": schedule.min_lr}
    return create_scheduler_v2(optimizer, schedule.kind, step_on_epochs=False, **options)[0]
