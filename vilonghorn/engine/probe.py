"""What the frozen features of a model tell of classes: logistic regression and nearest neighbours on them."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from .config import Config, TaskConfig
from .device import autocast, pick_device
from .distributed import Distributed
from .evaluate import load_run, name_weights
from .loaders import build_loader, check_classes
from .model_setup import explain_model_errors

NEIGHBOURS = 20


@torch.no_grad()
def extract_features(model: nn.Module, loader: Any, amp: torch.autocast) -> tuple[np.ndarray, np.ndarray]:
    """The pooled features of all images of a loader, of all processes, (N, C) float32, and their labels, (N,)."""
    features, labels = [], []
    with closing(loader.epoch(0)) as batches:
        for images, targets in batches:
            with amp:
                pooled = model.forward_head(model.forward_features(images), pre_logits=True)
            features.append(pooled.float().cpu().numpy())
            labels.append(targets.cpu().numpy())
    parts = Distributed().gather((np.concatenate(features), np.concatenate(labels)))
    return tuple(map(np.concatenate, zip(*parts)))  # type: ignore[return-value]


def probe(model: nn.Module, train: Any, val: Any, amp: torch.autocast) -> dict[str, float]:
    """Classifies held-out images by frozen features.

    Args:
        model: a timm model on the device of the loaders, in evaluation mode.
        train: loader of labelled images, without augmentation.
        val: loader of held-out images.
        amp: autocast context.

    Returns:
        Top-1 in percent of "linear", logistic regression on standardised features, and of "knn", the 20 nearest
        neighbours by cosine, weighted by their distance.
    """
    from sklearn.linear_model import LogisticRegression  # slow to import
    from sklearn.neighbors import KNeighborsClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    known, unseen = extract_features(model, train, amp), extract_features(model, val, amp)
    neighbours = KNeighborsClassifier(min(NEIGHBOURS, len(known[0])), weights="distance", metric="cosine")
    methods = {"linear": make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)), "knn": neighbours}
    return {name: 100 * float(method.fit(*known).score(*unseen)) for name, method in methods.items()}


def probe_run(directory: str | Path, config: Config, checkpoint: str = "best") -> dict[str, Any]:
    """Probes the "best" or "last" weights of a run on `config.data`, whose images need labels.

    Returns:
        What `probe` returns; images, the numbers of both; and the record of `load_run`.

    Raises:
        ValueError: the data has no classes, or only one, or the model does not take images of `data.image_size`.
    """
    Distributed().init()
    model, record = load_run(directory, checkpoint)
    config, device = replace(config, task=TaskConfig()), pick_device(config.run.device)
    shape = 2, 3, config.data.image_size, config.data.image_size
    problem = f"the run in {directory} does not turn images {shape} into features"
    with explain_model_errors(problem, "change data.image_size"):
        model.forward_head(model.forward_features(torch.zeros(shape)), pre_logits=True)
    train = build_loader(config, device, training=False, split="train")
    val = build_loader(config, device, training=False, classes=train.class_names)
    check_classes(config.data.train, train.num_classes, config.data.val, val)
    if np.unique(train.targets).size < 2:
        raise ValueError(f"{config.data.train} has images of one class only, expected two or more for --probe")
    found = probe(model.to(device), train, val, autocast(config.run.amp, device))
    return {**found, "images": (train.num_samples, val.num_samples), "record": record}


def summarize_probe(run: str | Path, checkpoint: str, result: dict[str, Any]) -> str:
    """One line on the result of `probe_run`."""
    scores = f"linear probe {result['linear']:.2f}%, {NEIGHBOURS} nearest neighbours {result['knn']:.2f}%"
    counts = "{} images, {} labelled ones to learn from".format(*reversed(result["images"]))
    return f"held-out top-1 by {scores} on {counts}: {name_weights(checkpoint, result['record'])} of {run}"
