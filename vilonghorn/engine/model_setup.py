"""The model of a run, made from its configuration with its initial weights, and what it must do."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import timm
import torch
from timm.layers import to_ntuple
from torch import nn

from ..models.weights_file import check_numbers, one_line
from .config import Config
from .device import autocast
from .distributed import Distributed
from .initial_weights import DOWNLOAD_REMEDY, check_normalization, describe_loaded, find_weights, read_initial_weights

# What models raise if they do not support their arguments or images.
MODEL_ERRORS = (TypeError, ValueError, ArithmeticError, RuntimeError, AssertionError, AttributeError, LookupError)


@contextmanager
def explain_model_errors(problem: str, remedy: str = "") -> Iterator[None]:
    """Turns `MODEL_ERRORS` into a ValueError that says the problem, the error and the remedy."""
    try:
        yield
    except MODEL_ERRORS as error:
        end = f": {remedy}" if remedy else ""
        raise ValueError(f"{problem} ({one_line(error)}){end}") from error


def model_kwargs(config: Config, num_classes: int) -> dict[str, Any]:
    """The arguments of the model, with `img_size` if its input size is fixed. Checks `model.num_classes`."""
    model = config.model
    if model.num_classes not in (None, num_classes):
        remedy = "make them equal, or leave model.num_classes null"
        raise ValueError(f"model.num_classes is {model.num_classes} but the data has {num_classes} classes: {remedy}")
    cfg = timm.get_pretrained_cfg(model.name.partition(".")[0])
    size = {"img_size": config.data.image_size} if cfg is not None and cfg.fixed_input_size else {}
    drop_path = {} if model.drop_path is None else {"drop_path_rate": model.drop_path}
    mask_token = {} if config.task.labelled else {"mask_token": True}
    return {"num_classes": num_classes, **size, **drop_path, **mask_token, **model.kwargs}


def model_from_config(config: Config, num_classes: int) -> nn.Module:
    """The model with its initial weights, on the CPU.

    Raises:
        FileNotFoundError: there is no file `model.weights`.
        OSError: the published weights cannot be downloaded.
        ValueError: the model rejects its arguments or weights, or `model.num_classes` is not that of the data.
    """
    name, kwargs = config.model.name, model_kwargs(config, num_classes)
    weights = config.model.weights
    if weights == "auto" and (weights := None if config.model.pretrained else find_weights(name)) is None:
        if not config.model.pretrained:
            Distributed().print(f"model.weights: random, because no weights of {name} are on this machine")
    check_numbers(name, kwargs, "the configuration")
    init, problem = {}, f"timm cannot make {name} with {kwargs}"
    if weights is not None:
        with torch.random.fork_rng(devices=[]), explain_model_errors(problem):
            fresh = timm.create_model(name, **kwargs)
        init = {"pretrained_cfg_overlay": read_initial_weights(name, weights)}
    remedy = "set model.weights to null for random weights" if init and config.model.weights == "auto" else ""
    try:
        with explain_model_errors(problem, remedy):
            model = timm.create_model(name, pretrained=config.model.pretrained or bool(init), **kwargs, **init)
    except OSError as error:
        what = f"the published weights of {name} cannot be downloaded ({one_line(error)})"
        raise OSError(f"{what}: {DOWNLOAD_REMEDY}") from error
    if weights is not None:
        given = init["pretrained_cfg_overlay"]["state_dict"]
        Distributed().print(describe_loaded(model, fresh, name, weights, given))
    if num_classes and (init or config.model.pretrained) and model.pretrained_cfg["num_classes"] != num_classes:
        zero_classifier(model)
    check_normalization(config, init.get("pretrained_cfg_overlay", {}))
    return model


@torch.no_grad()
def zero_classifier(model: nn.Module) -> None:
    """Makes a new classifier on pretrained features zero, as timm draws some so large that they harm the features.

    EfficientNets draw it from [-1 / sqrt(classes), 1 / sqrt(classes)], however many features there are: with four
    classes and 1,280 features the first loss is about 5, where equal scores have 1.4.
    """
    for name in filter(None, to_ntuple(1)(model.pretrained_cfg.get("classifier"))):
        for parameter in model.get_submodule(name).parameters():
            nn.init.zeros_(parameter)


@torch.no_grad()
def check_model(config: Config, model: nn.Module, num_classes: int, device: torch.device) -> None:
    """Raises ValueError if a model does not turn images of every size in the run into class scores."""
    name, kwargs, training, last = config.model.name, config.model.kwargs, model.training, config.image_sizes()[-1]
    for size in config.image_sizes():
        images = torch.zeros(2, 3, *size, device=device)
        expected = f"{name} with {kwargs} does not turn images {tuple(images.shape)} into scores (2, {num_classes})"
        smaller = "augmentation.sizes" if config.augmentation.sizes else "augmentation.start_size"
        remedy = f"change {'data.image_size' if size == last else smaller} or model.kwargs"
        remedy += " (dynamic_img_pad: true takes any size; vilonghorn_* and vim_* need dynamic_img_size: true, too)"
        try:
            with explain_model_errors(expected, remedy), autocast(config.run.amp, device):
                scores = model.eval()(images)
        finally:
            model.train(training)
        found = tuple(scores.shape) if isinstance(scores, torch.Tensor) else f"a {type(scores).__name__}"
        if found != (2, num_classes):
            raise ValueError(f"{expected} but into {found}: change model.name or model.kwargs")
    if training and config.data.batch_size == 1:  # batch norm may need two values for each channel
        with explain_model_errors(f"{name} cannot train on one image", "raise data.batch_size"):
            deepcopy(model)(torch.zeros(1, 3, *last, device=device))
