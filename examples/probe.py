"""What the frozen features of a run tell of classes: logistic regression and nearest neighbours on them.

python examples/probe.py runs/pretrained photos/train photos/val
"""

import argparse
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn

from vilonghorn.engine import load_config, load_run
from vilonghorn.engine.config import TaskConfig
from vilonghorn.engine.config_file import run_config
from vilonghorn.engine.device import pick_device
from vilonghorn.engine.loaders import build_loader, check_classes

NEIGHBOURS = 20


@torch.inference_mode()
def extract_features(model: nn.Module, loader: Any) -> tuple[np.ndarray, np.ndarray]:
    """The pooled features of all images of a loader, (N, C) float32, and their labels, (N,)."""
    features, labels = [], []
    with closing(loader.epoch(0)) as batches:
        for images, targets in batches:
            features.append(model.forward_head(model.forward_features(images), pre_logits=True).cpu().numpy())
            labels.append(targets.cpu().numpy())
    return np.concatenate(features), np.concatenate(labels)


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Prints and returns the top-1 of both methods on held-out images, in percent."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", help="directory of the run, with or without labels")
    parser.add_argument("train", help="labelled images to learn from, a folder or a .beton")
    parser.add_argument("val", help="labelled images to measure on")
    parser.add_argument("--checkpoint", choices=["best", "last"], default="best", help="weights (default: %(default)s)")
    options = parser.parse_args(argv)
    config = load_config(run_config(options.run), f"--data.train={options.train}", f"--data.val={options.val}")
    config, device = replace(config, task=TaskConfig()), pick_device(config.run.device)
    model = load_run(options.run, options.checkpoint)[0].to(device)
    train = build_loader(config, device, training=False, split="train")  # without augmentation
    val = build_loader(config, device, training=False, classes=train.class_names)
    check_classes(options.train, train.num_classes, train.class_names, options.val, val)
    known, unseen = extract_features(model, train), extract_features(model, val)
    neighbours = KNeighborsClassifier(min(NEIGHBOURS, len(known[0])), weights="distance", metric="cosine")
    methods = {"linear": make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)), "knn": neighbours}
    scores = {name: 100 * float(method.fit(*known).score(*unseen)) for name, method in methods.items()}
    line = f"linear probe {scores['linear']:.2f}%, {NEIGHBOURS} nearest neighbours {scores['knn']:.2f}%"
    print(f"held-out top-1 by {line} on {val.num_samples} images, {train.num_samples} labelled ones to learn from")
    return scores


if __name__ == "__main__":
    main()
