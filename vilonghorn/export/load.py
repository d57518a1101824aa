"""Makes the model that is exported, from a name, a checkpoint and an image size."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm
from torch import nn

from ..engine.checkpoint import RunDirectory, load_weights
from ..engine.evaluate import preprocessing
from ..inference import create_model, is_ours, load
from ..layers.patch_embed import padding
from .capture import backbone, min_grid


def load_for_export(
    name: str | Path,
    checkpoint: str | Path | None = None,
    img_size: Sequence[int] | None = None,
    features: Sequence[int] | None = None,
) -> nn.Module:
    """Makes a model for any image size, in evaluation mode, with frozen float32 parameters.

    A run may have a model of another package, for images of the run's size.

    Args:
        name: directory of a run, or a registered model of this library; with a tag, its pretrained weights.
        checkpoint: of a run "best" (default) or "last"; of a model weights of a run, whose record has the model's
            arguments, or a state dict that timm reads. Default: those of the tag, or random weights.
        img_size: side, or height and width, in pixels, of the position embedding and of the file's preprocessing.
            Default: the checkpoint's, or else the model's.
        features: blocks, or stages of a hierarchy, whose maps the model returns in a list, in place of logits, as with
            timm's `features_only=True, out_indices=features`; an empty list for the model's default. Default: logits.

    Raises:
        ValueError: unknown model, a size or an index that does not fit it, or weights of another model.
        FileNotFoundError: there is no such checkpoint.
    """
    name, kwargs, overlay = str(name), dict[str, Any](dynamic_img_pad=False), dict[str, Any]()
    if Path(name).is_dir():
        run, which = name, str(checkpoint or "best")
        checkpoint = RunDirectory(run).weights(which)
        overlay = preprocessing(run)
        name = load_weights(checkpoint, tensors=False)[1].get("model", "")
        if not is_ours(name):
            if img_size is not None or features is not None:
                raise ValueError(f"{run} has {name} of another package: leave out --img-size and --features")
            loaded = load(run, which, device="cpu")
            cfg = dict(architecture=loaded.architecture, label_names=loaded.class_names)
            loaded.model.pretrained_cfg = loaded.preprocessing | cfg  # type: ignore[assignment]
            return loaded.model.float().requires_grad_(False)
    if not is_ours(name):
        known = ", ".join(filter(is_ours, timm.list_models()))
        raise ValueError(f"{name} is neither the directory of a run nor one of this library's models: {known}")
    if timm.models.get_pretrained_cfg_value(name.partition(".")[0], "fixed_input_size"):
        kwargs["dynamic_img_size"] = True
    if img_size is not None:
        if len(img_size) > 2 or min(img_size) < 1:
            raise ValueError(f"--img-size is {img_size}, expected one side, or height and width, in pixels")
        kwargs["img_size"] = (img_size[0], img_size[-1])
        overlay["input_size"] = (3, *kwargs["img_size"])
    if features is not None:
        kwargs |= dict(features_only=True) | (dict(out_indices=tuple(features)) if features else {})
    model, class_names = create_model(name, str(checkpoint or ("pretrained" if "." in name else "random")), kwargs)
    model.pretrained_cfg = {**model.pretrained_cfg, **overlay, "label_names": class_names}
    if features and [*model.out_indices] != sorted({*model.out_indices}):
        raise ValueError(
            f"--features is {features}, expected different indices in ascending order, as maps are returned"
        )
    net = backbone(model)
    step, patch = net.patches()
    height, width = model.pretrained_cfg["input_size"][-2:]
    model.pretrained_cfg["input_size"] = (net.in_chans, height, width)
    if any(padding((height, width), patch, step)):
        problem = f"image of {height}x{width} is not a whole number of {patch[0]}x{patch[1]} patches of the run"
        raise ValueError(f"{problem}, and files do not pad: give --img-size, to which images are resized")
    net.set_input_size((height, width))  # that of a run, which its model's arguments may not have
    least, grid = min_grid(model), net.grid_size()
    if min(grid) < least:
        problem = f"images of {net.image_size(*grid)} pixels are fewer than {least} patches high or wide"
        raise ValueError(f"{problem}: give a larger --img-size")
    return model.eval().float().requires_grad_(False)
