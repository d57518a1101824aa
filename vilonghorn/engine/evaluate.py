"""Measures models on held-out data, in training or from the weights that a run left."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import nn

from .build import autocast, check_model, pick_device, val_loader
from .checkpoint import load_weights
from .checks import check_class_names, reason_of
from .config import AugmentationConfig, Config, ModelConfig
from .directory import RunDirectory
from .distributed import Ranks


@torch.no_grad()
def evaluate(
    models: dict[str, nn.Module],
    loader: Any,
    *,
    amp: torch.autocast,
    on_batch: Callable[[], None] = lambda: None,
    ranks: Ranks | None = None,
) -> dict[str, dict[str, float]]:
    """Measures models in one pass over the data.

    Args:
        models: name to model, on the loader's device; set to evaluation and left there.
        loader: the held-out data, or the share of it that this process has.
        amp: autocast context.
        on_batch: called after each batch, as often in every process; what it raises ends the pass.
        ranks: the processes, whose shares make the data; None: this one alone.

    Returns:
        Name to {"top1": percent, "top5": percent, "loss": mean cross-entropy}. With up to 5 classes, top5 is 100, but
        that images whose scores hold NaN count as not recognised.
    """
    ranks = ranks or Ranks()
    sums = {name: torch.zeros(4, dtype=torch.float64) for name in models}  # right, among the first five, loss, images
    for model in models.values():
        model.eval()
    with closing(loader.epoch(0)) as batches:
        for _ in range(ranks.most(len(loader))):
            images, targets = next(batches, (None, None))
            for name, model in models.items() if images is not None else ():
                with amp:
                    logits = model(images)
                logits = logits.float()
                hits = logits.topk(min(5, logits.shape[1])).indices == targets[:, None]
                hits &= ~logits.isnan().any(1, keepdim=True)  # among which topk picks classes at will
                loss = F.cross_entropy(logits, targets, reduction="sum")
                sums[name] += torch.stack([hits[:, 0].sum(), hits.sum(), loss, loss.new_tensor(len(targets))]).cpu()
            on_batch()
    totals = {name: ranks.sum(own.tolist()) for name, own in sums.items()}
    return {
        name: {"top1": 100 * top1 / count, "top5": 100 * top5 / count, "loss": loss / count}
        for name, (top1, top5, loss, count) in totals.items()
    }


def load_run(directory: str | Path, checkpoint: str = "best") -> tuple[nn.Module, dict[str, Any]]:
    """A fresh model with the weights that a run left, on the CPU.

    Args:
        directory: the run's.
        checkpoint: "best" or "last".

    Returns:
        The model in evaluation mode, and what the run recorded of these weights: model, kwargs, class_names, epoch,
        weights ("ema" or "model"), and top1, top5 and loss on the held-out data.

    Raises:
        FileNotFoundError: there are no such weights.
        ValueError: the file is not safetensors, or its record and its weights do not make a model.
    """
    path = RunDirectory(directory).weights(checkpoint)
    weights, record = load_weights(path)
    try:
        record["kwargs"]["num_classes"], record["weights"], record["epoch"]
        model = timm.create_model(record["model"], **record["kwargs"])
        model.load_state_dict(weights)
    except (KeyError, TypeError, AttributeError, RuntimeError, AssertionError) as error:
        raise ValueError(
            f"{path} does not hold the weights and the record that a run leaves ({reason_of(error)})"
        ) from error
    return model.eval(), record


def evaluate_run(directory: str | Path, config: Config, checkpoint: str = "best") -> dict[str, Any]:
    """Measures anew the weights that a run left.

    Args:
        directory: the run's.
        config: its configuration; `data`, `run.device` and `run.amp` are used.
        checkpoint: "best" or "last".

    Returns:
        top1, top5 and loss; images, how many were measured; and the record of `load_run`.

    Raises:
        ValueError: the data has another number of classes than the model, or calls them otherwise than the run did,
            or the model does not take images of `data.image_size`.
    """
    model, record = load_run(directory, checkpoint)
    ranks = Ranks()
    ranks.join()
    device = pick_device(config.run.device, ranks)
    loader = val_loader(config, device, ranks)
    classes = record["kwargs"]["num_classes"]
    if loader.num_classes != classes:
        raise ValueError(f"{config.data.val} has {loader.num_classes} classes but the run's model has {classes}")
    check_class_names(f"the run in {directory}", record.get("class_names"), config.data.val, loader.class_names)
    asked = replace(
        config, model=ModelConfig(record["model"], kwargs=record["kwargs"]), augmentation=AugmentationConfig()
    )
    check_model(asked, model.to(device), classes, device)
    result = evaluate({"model": model}, loader, amp=autocast(config.run.amp, device), ranks=ranks)["model"]
    return {**result, "images": loader.num_samples, "record": record}
