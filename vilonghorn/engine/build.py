"""From a configuration to the parts of a run: device, precision, data, model, optimizer, schedule, mixing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import timm
import torch
from timm.data import Mixup
from timm.layers import DropPath
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from torch import nn

from ..data import create_loader
from ..data.loaders.settings import grown_size
from ..data.threads import available_cpus
from .checks import reason_of
from .config import Config
from .distributed import Ranks
from .start import weights_overlay

# What models raise where keywords or images do not suit them.
REFUSALS = (TypeError, ValueError, RuntimeError, AssertionError, AttributeError, KeyError, IndexError)


def pick_device(name: str, ranks: Ranks | None = None) -> torch.device:
    """The device of a name; "auto" is the accelerator if there is one, or else the CPU.

    Args:
        name: "auto", or what torch calls it; of several GPUs, one without a number is that of `ranks.local_rank`.
        ranks: the processes of the run; None: this one alone.

    Raises:
        ValueError: torch knows no such device, has none here, or it is meant for several processes.
    """
    ranks = ranks or Ranks()
    try:
        auto = torch.accelerator.current_accelerator(check_available=True) if name == "auto" else torch.device(name)
        device = auto or torch.device("cpu")
        if device.type == "cuda" and ranks.local_size > 1:
            if name not in ("auto", "cuda"):
                raise ValueError(f"run.device is {name!r} for {ranks.local_size} processes: make it auto or cuda")
            device = torch.device("cuda", ranks.local_rank)
            torch.cuda.set_device(device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"run.device is {name!r}, which cannot be used here: {str(error).splitlines()[0]}") from error
    return device


def autocast(amp: str, device: torch.device) -> torch.autocast:
    """The autocast context of `run.amp`; "auto" is bfloat16 on CUDA devices that have it."""
    if amp == "auto":
        amp = "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False) else "off"
    dtype = torch.float16 if amp == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype, enabled=amp != "off")


def compiles(config: Config, device: torch.device) -> bool:
    """Whether the model is compiled: as configured, or on CUDA devices."""
    return device.type == "cuda" if config.run.compile is None else config.run.compile


def own_workers(config: Config, ranks: Ranks) -> int | None:
    """Decoders of one process: as configured, or its share of the machine's CPUs."""
    if config.data.workers is None and ranks.local_size > 1:
        return max(1, available_cpus() // ranks.local_size)
    return config.data.workers


def train_loader(config: Config, device: torch.device, ranks: Ranks | None = None) -> Any:
    """The training data of a run, shuffled and cropped at random: the share of this process."""
    ranks = ranks or Ranks()
    data, augmentation = config.data, config.augmentation
    return create_loader(
        data.train,
        batch_size=data.batch_size,
        image_size=data.image_size,
        training=True,
        seed=config.run.seed,
        workers=own_workers(config, ranks),
        device=device,
        rank=ranks.rank,
        world_size=ranks.world_size,
        mean=data.mean,
        std=data.std,
        scale=augmentation.scale,
        ratio=augmentation.ratio,
        interpolation=augmentation.interpolation,
        hflip=augmentation.hflip,
        auto_augment=augmentation.auto_augment,
        color_jitter=augmentation.color_jitter,
        erase=augmentation.erase,
        repeats=augmentation.repeats,
        start_size=augmentation.start_size,
        ramp=augmentation.ramp,
    )


def val_loader(config: Config, device: torch.device, ranks: Ranks | None = None) -> Any:
    """The held-out data of a run in order: the share of this process, without padding."""
    ranks = ranks or Ranks()
    data = config.data
    return create_loader(
        data.val,
        batch_size=data.batch_size,
        image_size=data.image_size,
        training=False,
        workers=own_workers(config, ranks),
        device=device,
        rank=ranks.rank,
        world_size=ranks.world_size,
        mean=data.mean,
        std=data.std,
        crop_pct=data.crop_pct,
        interpolation=data.interpolation,
    )


def model_kwargs(config: Config, num_classes: int) -> dict[str, Any]:
    """The keywords of the configured model; `data.image_size` is among them where models have a fixed `img_size`.

    Raises:
        ValueError: `model.num_classes` is not the data's.
    """
    model = config.model
    if model.num_classes not in (None, num_classes):
        raise ValueError(
            f"model.num_classes is {model.num_classes} but the data has {num_classes} classes: "
            "make them equal, or leave model.num_classes null"
        )
    cfg = timm.get_pretrained_cfg(model.name.partition(".")[0])
    size = {"img_size": config.data.image_size} if cfg is not None and cfg.fixed_input_size else {}
    drop_path = {"drop_path_rate": model.drop_path} if model.drop_path else {}
    return {"num_classes": num_classes, **size, **drop_path, **model.kwargs}


def build_model(config: Config, num_classes: int) -> nn.Module:
    """Builds the configured model, on the CPU, with the weights that it starts from.

    Raises:
        FileNotFoundError: there are no weights where `model.weights` says.
        ValueError: the model refuses its arguments or weights, or `model.num_classes` is not the data's.
    """
    name, kwargs = config.model.name, model_kwargs(config, num_classes)
    start = {} if config.model.weights is None else {"pretrained_cfg_overlay": weights_overlay(config.model.weights)}
    try:
        model = timm.create_model(name, pretrained=config.model.pretrained or bool(start), **kwargs, **start)
    except (*REFUSALS, ZeroDivisionError) as error:
        raise ValueError(f"timm cannot make {name} with {kwargs} ({reason_of(error)})") from error
    for module in model.modules() if not config.model.drop_path else ():
        if isinstance(module, DropPath):
            module.drop_prob = 0.0  # some models have a rate of their own, and others no keyword to be told 0 by
    return model


@torch.no_grad()
def check_model(config: Config, model: nn.Module, num_classes: int, device: torch.device) -> None:
    """Refuses a model that does not turn the data's images, of every size that they grow through, into class scores.

    Raises:
        ValueError: one sentence that names the model, its keywords, and what comes out of it.
    """
    name, kwargs, training = config.model.name, config.model.kwargs, model.training
    last, recipe = config.data.image_size, config.augmentation
    grown = (grown_size(e, (last, last), recipe.start_size, recipe.ramp) for e in range(config.schedule.epochs))
    for size in sorted({last, *(height for height, _ in grown)}):
        expected = f"{name} with {kwargs} does not turn images (2, 3, {size}, {size}) into scores (2, {num_classes})"
        try:
            with autocast(config.run.amp, device):
                scores = model.eval()(torch.zeros(2, 3, size, size, device=device))
        except REFUSALS as error:
            remedy = "data.image_size" if size == last else "augmentation.start_size"
            remedy += " or model.kwargs (dynamic_img_size: true with dynamic_img_pad: true takes any size)"
            raise ValueError(f"{expected} ({reason_of(error)}): change {remedy}") from error
        finally:
            model.train(training)
        if not isinstance(scores, torch.Tensor) or scores.shape != (2, num_classes):
            found = tuple(scores.shape) if isinstance(scores, torch.Tensor) else f"a {type(scores).__name__}"
            raise ValueError(f"{expected} but into {found}: change model.name or model.kwargs")


def scale_rates(config: Config, images: int) -> Config:
    """The configuration with every learning rate scaled from `optimizer.lr_batch` to updates of this many images.

    Linear, as Goyal et al. (2017, arXiv 1706.02677) and DeiT's recipe do it; `warmup_lr` and `min_lr` keep their
    proportion to the peak.
    """
    optimizer, schedule = config.optimizer, config.schedule
    factor = images / optimizer.lr_batch if optimizer.lr_batch else 1.0
    rates = replace(schedule, warmup_lr=schedule.warmup_lr * factor, min_lr=schedule.min_lr * factor)
    return replace(config, optimizer=replace(optimizer, lr=optimizer.lr * factor), schedule=rates)


def build_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    """The configured optimizer, without weight decay on vectors and on the model's `no_weight_decay()`.

    Raises:
        ValueError: it cannot be made here, or needs more than gradients.
    """
    optimizer = config.optimizer
    try:
        made = create_optimizer_v2(
            model,
            optimizer.name,
            lr=optimizer.lr,
            weight_decay=optimizer.weight_decay,
            betas=optimizer.betas,
            eps=optimizer.eps,
            layer_decay=optimizer.layer_decay,
        )
    except REFUSALS as error:
        raise ValueError(
            f"optimizer.name is {optimizer.name!r}, which timm cannot make here ({reason_of(error)})"
        ) from error
    if getattr(made, "is_second_order", False):
        raise ValueError(f"optimizer.name is {optimizer.name!r}, which needs second derivatives: choose another")
    return made


def build_scheduler(config: Config, optimizer: torch.optim.Optimizer, updates_per_epoch: int) -> Scheduler:
    """The configured schedule, whose `step_update(n)` sets the rate of the update after the n-th."""
    schedule = config.schedule
    return create_scheduler_v2(
        optimizer,
        "cosine",
        num_epochs=schedule.epochs,
        warmup_epochs=schedule.warmup_epochs,
        warmup_lr=schedule.warmup_lr,
        min_lr=schedule.min_lr,
        step_on_epochs=False,
        updates_per_epoch=updates_per_epoch,
    )[0]


def build_mixup(config: Config, num_classes: int) -> Mixup | None:
    """The configured mixup and cutmix, label smoothing included; None where both are off."""
    mix = config.augmentation
    if not (mix.mixup or mix.cutmix):
        return None
    return Mixup(
        mix.mixup,
        mix.cutmix,
        prob=mix.mix_prob,
        switch_prob=mix.switch_prob,
        label_smoothing=mix.label_smoothing,
        num_classes=num_classes,
    )
