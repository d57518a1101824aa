"""A run's directory as training leaves it, with random weights, and image files that suit it."""

from pathlib import Path

import numpy as np
import torch
import yaml
from PIL import Image
from torch import nn
from toy_run import toy_config

from vilonghorn.engine import model_from_config
from vilonghorn.engine.checkpoint import save_weights

NAMES = ["ant", "bee", "cat", "dog", "eel", "fox"]
SIDE = 16


def leave_run(directory: Path, name: str = "vilonghorn_nano", **kwargs) -> nn.Module:
    """Writes config.yaml and best.safetensors of a small model for images of 16 px, and returns the model."""
    if not name.startswith("vilonghornv2"):
        kwargs = dict(patch_size=4, depth=2, embed_dim=32) | kwargs
    options = [f"--model.name={name}", f"--model.kwargs={yaml.safe_dump(kwargs, default_flow_style=True).strip()}"]
    options += ["--data.crop_pct=1.0", "--data.mean=[0.5, 0.4, 0.3]", "--data.std=[0.5, 0.6, 0.7]"]
    config = toy_config(directory, *options)
    torch.manual_seed(0)
    model = model_from_config(config, len(NAMES)).eval()
    with torch.no_grad():
        model.get_classifier().weight.normal_()  # so that classes differ
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(yaml.safe_dump(config.to_dict()))
    kwargs = dict(num_classes=len(NAMES), img_size=SIDE, drop_path_rate=config.model.drop_path) | kwargs
    record = dict(model=name, kwargs=kwargs, class_names=NAMES, weights="ema", epoch=3)
    save_weights(directory / "best.safetensors", model.state_dict(), record)
    return model


def make_image(path: Path, seed: int) -> torch.Tensor:
    """Writes a PNG of noise, 16 px, and returns what the run's model is given for it, (1, 3, 16, 16)."""
    pixels = np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    mean, std = (torch.tensor(v)[:, None, None] for v in ((0.5, 0.4, 0.3), (0.5, 0.6, 0.7)))
    return ((torch.from_numpy(pixels).permute(2, 0, 1) / 255 - mean) / std)[None]
