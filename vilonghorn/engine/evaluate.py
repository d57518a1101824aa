"""Evaluates models on held-out data, during training or from the weights of a run."""

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from timm.data import ImageNetInfo, infer_imagenet_subset
from timm.layers import to_2tuple
from torch import nn

from ..data.image_file import printable
from ..data.loaders.config import ImageConfig, LoaderConfig
from ..models.weights_file import check_architecture, one_line
from .checkpoint import RunDirectory, load_weights
from .command_line import load_config
from .config import AugmentationConfig, Config, ModelConfig
from .config_file import run_config
from .device import autocast, pick_device
from .distributed import Distributed
from .loaders import build_loader, check_classes
from .model_setup import check_model, explain_model_errors
from .predictions import COLUMNS, ROWS, Prediction, Predictions

CLASS_SCORES = ("top1", "top5", "loss")
TRANSFORM = ("image_size", "mean", "std", "crop_pct", "crop_mode", "interpolation")  # keys of data that records have


def class_scores(model: nn.Module, images: torch.Tensor, targets: torch.Tensor, amp: torch.autocast) -> torch.Tensor:
    """The sums over a batch of `CLASS_SCORES`: hits in percent, and the cross-entropy."""
    with amp:
        logits = model(images)
    logits = logits.float()
    hits = 100 * (top_classes(logits) == targets[:, None])
    return torch.stack([hits[:, 0].sum(), hits.sum(), F.cross_entropy(logits, targets, reduction="sum")])


@torch.no_grad()
def evaluate(
    models: dict[str, nn.Module],
    loader: Any,
    *,
    amp: torch.autocast,
    on_batch: Callable[[], None] = lambda: None,
    names: Sequence[str] = CLASS_SCORES,
    measure: Callable[..., torch.Tensor] = class_scores,
) -> dict[str, dict[str, float]]:
    """Evaluates models in one pass over the data.

    Args:
        models: name to model, on the loader's device; left in evaluation mode.
        loader: the held-out data, or the part of this process.
        amp: autocast context.
        on_batch: called after each batch, equally often in every process; may raise to stop.
        names: of the scores.
        measure: model, images, targets and amp to the sums over a batch of these scores.

    Returns:
        Name to mean scores: {"top1": percent, "top5": percent, "loss": cross-entropy}. Scores with NaN count as wrong.
    """
    dist = Distributed()
    sums = {name: torch.zeros(len(names) + 1, dtype=torch.float64) for name in models}  # the scores, images
    for model in models.values():
        model.eval()
    with closing(loader.epoch(0)) as batches:
        for _ in range(int(dist.sum([dist.is_main * len(loader)])[0])):  # process 0 has the most batches
            images, targets = next(batches, (None, None))
            for name, model in models.items() if images is not None else ():
                found = measure(model, images, targets, amp)
                sums[name] += torch.cat([found, found.new_tensor([len(targets)])]).cpu()
            on_batch()
    totals = {name: dist.sum(own.tolist()) for name, own in sums.items()}
    return {name: {key: total / own[-1] for key, total in zip(names, own)} for name, own in totals.items()}


def predict_all(model: nn.Module, loader: Any, amp: torch.autocast, dist: Distributed) -> Predictions:
    """Classifies the held-out images, each process its part, and returns scores and predictions for all of them."""
    count = max(1, COLUMNS * (ROWS - 1) // dist.world_size)
    sampled = set(torch.linspace(0, len(loader) * loader.batch_size - 1, count).long().tolist())
    files = getattr(loader, "sample_names", None)  # a loader of the user's own may have none
    rows, mistakes, sample = [], [], []

    def measure(model: nn.Module, images: torch.Tensor, targets: torch.Tensor, amp: torch.autocast) -> torch.Tensor:
        with amp:
            logits = model(images).float()
        classes = F.pad(top_classes(logits)[:, :2], (0, max(0, 2 - logits.shape[1])), value=-1)
        probabilities = logits.softmax(1).gather(1, classes.clamp(0)).nan_to_num()
        for image, truth, guesses, scores in zip(images, *map(torch.Tensor.tolist, (targets, classes, probabilities))):
            index = dist.rank + dist.world_size * len(rows)
            row = Prediction(index, files[index] if files else f"sample {index}", truth, *guesses, *scores)
            if row.guess != truth:
                mistakes.append((image.float().cpu(), row))
                mistakes[:] = sorted(mistakes, key=lambda example: -example[1].probability)[:COLUMNS]
            elif len(rows) in sampled:
                sample.append((image.float().cpu(), row))
            rows.append(row)
        return class_scores(nn.Identity(), logits, targets, amp)

    scores = evaluate({"model": model}, loader, amp=amp, measure=measure)["model"]
    rows, mistakes, sample = (sum(parts, []) for parts in zip(*dist.gather((rows, mistakes, sample))))
    mistakes = sorted(mistakes, key=lambda example: -example[1].probability)[:COLUMNS]
    names = [printable(name) for name in loader.class_names or map(str, range(loader.num_classes))]
    return Predictions(names, scores, sorted(rows), mistakes, sample)


def top_classes(logits: torch.Tensor) -> torch.Tensor:
    """The most likely classes, best first, (B, min(5, classes)) of logits (B, classes); -1 if one of them is NaN."""
    top = logits.topk(min(5, logits.shape[1])).indices  # of equal logits, argmax takes others
    return top.masked_fill(logits.isnan().any(1, keepdim=True), -1)


def quality(scores: dict[str, float]) -> tuple[float, float]:
    """What orders epochs of a run: top-1, if any, then the loss. A loss that is not known or no number comes last."""
    loss = scores.get("loss", math.nan)
    return scores.get("top1", 0.0), -math.inf if math.isnan(loss) else -loss


def average_lags(results: dict[str, dict[str, float]], images: int) -> bool:
    """Whether "ema" is worse than "model" by two standard errors of top-1 on `images`; else 5% of the loss."""
    model, ema = results["model"], results.get("ema", results["model"])
    if "top1" not in model:
        return ema["loss"] > 1.05 * model["loss"]
    mean = (model["top1"] + ema["top1"]) / 200
    return model["top1"] - ema["top1"] > 100 * 2 * math.sqrt(2 * mean * (1 - mean) / images)


def name_weights(checkpoint: str, record: dict[str, Any]) -> str:
    """The name of the "best" or "last" weights of a run with this record, as logs and pages have it."""
    return f"{checkpoint} weights ({printable(record['weights'])}, epoch {record['epoch']})"


def summarize(run: str | Path, checkpoint: str, record: dict[str, Any], result: dict[str, Any]) -> str:
    """One line on weights of a run: `top1`, `top5`, `loss` and `images` of `result`, and what `record` says of them."""
    end = f"on {result['images']} images: {name_weights(checkpoint, record)} of {printable(str(run))}"
    if "top1" not in result:
        return f"held-out loss {result['loss']:.4f} {end}"
    top5 = f"top-5 {result['top5']:.2f}%, " if record["kwargs"]["num_classes"] > 5 else ""  # else it is 100%
    return f"held-out top-1 {result['top1']:.2f}%, {top5}loss {result['loss']:.4f} {end}"


def check_names(source: str | Path, num_classes: int, names: Sequence[str] | None) -> None:
    """Raises ValueError if the names of classes, unless unknown (None), are not one text for each class."""
    texts = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if names is not None and not (texts and len(names) == num_classes):
        found = f"{len(names)} class names" if texts else f"class names {str(names)[:80]}"
        raise ValueError(f"{source} has {num_classes} classes but {found}: expected a list of one text for each class")


def pretrained_class_names(model: nn.Module, synsets: bool = False) -> list[str] | None:
    """Class names of published weights. Those of ImageNet are descriptions, or `synsets` such as n01440764."""
    cfg = model.pretrained_cfg
    if getattr(model, "num_classes", cfg.get("num_classes")) != cfg.get("num_classes"):
        return None
    if cfg.get("label_names"):
        return list(cfg["label_names"])
    if (subset := infer_imagenet_subset(cfg)) is None:
        return None
    return ImageNetInfo(subset).label_names() if synsets else ImageNetInfo(subset).label_descriptions()


def load_run(run: str | Path, checkpoint: str = "best") -> tuple[nn.Module, dict[str, Any]]:
    """Loads the model of a run, onto the CPU, from its directory with its "best" or "last" weights, or from their file.

    Returns:
        The model in evaluation mode, and the record of its weights: model, kwargs, class_names, epoch, weights ("ema"
        or "model"), and top1, top5 and loss on the held-out data.

    Raises:
        FileNotFoundError: there are no such weights.
        ValueError: the file is not safetensors, or its record and weights do not make a model.
    """
    path = Path(run) if Path(run).is_file() else RunDirectory(run).weights(checkpoint)
    weights, record = load_weights(path)
    try:
        record["weights"], record["epoch"]
        check_architecture(record["model"], record["kwargs"], path, weights)
        check_names(path, record["kwargs"]["num_classes"], record.get("class_names"))
        model = timm.create_model(record["model"], **record["kwargs"])
        model.load_state_dict(weights)
    except (KeyError, TypeError, AttributeError, RuntimeError, AssertionError) as error:
        raise ValueError(f"{path} does not contain weights and record of a run ({one_line(error)})") from error
    return model.eval(), record


def preprocessing(run: str | Path) -> dict[str, Any]:
    """Returns the arguments of `timm.data.create_transform` that repeat a run's validation transform."""
    return _transform(load_config(run_config(run)).data)


def recorded_transform(record: dict[str, Any], source: str | Path) -> dict[str, Any]:
    """As `preprocessing`, of a record in the file `source`; empty if it has no `data`, ValueError if they are wrong."""
    if "data" not in record:  # of an earlier version, or not of a run
        return {}
    with explain_model_errors(f"{source} has a record of a run whose data are {str(record['data'])[:80]}"):
        return _transform(LoaderConfig(training=False, **record["data"]))


def _transform(data: ImageConfig) -> dict[str, Any]:
    interpolation = "box" if data.interpolation == "area" else data.interpolation
    crop = {"crop_pct": data.crop_pct, "crop_mode": data.crop_mode, "interpolation": interpolation}
    return {"input_size": (3, *to_2tuple(data.image_size)), "mean": tuple(data.mean), "std": tuple(data.std), **crop}


def evaluate_run(directory: str | Path, config: Config, checkpoint: str = "best") -> dict[str, Any]:
    """Evaluates the "best" or "last" weights of a run on `config.data`, with `run.device` and `run.amp` of `config`.

    Returns:
        top1, top5 and loss; images, the number of images; the record of `load_run`; and predictions, a `Predictions`.

    Raises:
        ValueError: the data has other classes than the run, or the model does not take images of `data.image_size`.
    """
    model, record = load_run(directory, checkpoint)
    if not (classes := record["kwargs"]["num_classes"]):
        raise ValueError(f"{directory} has learned without labels, no classes: train from its weights first")
    Distributed().init()
    device = pick_device(config.run.device)
    loader = build_loader(config, device, training=False, classes=record.get("class_names"))
    check_classes(f"the run in {directory}", classes, record.get("class_names"), config.data.val, loader)
    splits = config.data.val is None and config.data.val_split
    if splits and record.get("val_images", loader.content) != loader.content:
        changed = f"data.val_split ({splits}) or the files of data.train are not those of the training"
        remedy = f"give held-out images by --data.val, or {config.data.train} as it was"
        raise ValueError(f"{changed}, so that other images would be held out: {remedy}")
    saved = ModelConfig(record["model"], kwargs=record["kwargs"])
    check_model(replace(config, model=saved, augmentation=AugmentationConfig()), model.to(device), classes, device)
    found = predict_all(model, loader, autocast(config.run.amp, device), Distributed())
    return {**found.scores, "images": loader.num_samples, "record": record, "predictions": found}
