"""The model that a command looks at or asks: its weights, what an image must become for it, and its class names.

It is the directory of a run, or a name that timm knows with weights from a file; commands add `arguments` to their
parser and make the subject by `from_options`.
"""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
import yaml
from PIL import Image
from safetensors import SafetensorError
from timm.data import ImageNetInfo, create_transform, infer_imagenet_subset, resolve_model_data_config
from timm.models import load_checkpoint
from timm.utils import ParseKwargs
from torch import Tensor, nn

from ..engine import load_config, load_run
from ..engine.build import REFUSALS, pick_device
from ..engine.checkpoint import load_weights
from ..engine.checks import nearest
from ..engine.config import DataConfig

REMOTE = ("hf-hub:", "hf_hub:", "local-dir:")  # names that timm resolves elsewhere


@dataclass(frozen=True)
class Subject:
    """A classifier in evaluation mode, ready to be asked.

    Attributes:
        name: what the user called it, with its weights.
        model: on its device.
        transform: PIL image in RGB to the model's input, (3, H, W), normalised.
        mean, std: of each channel, as `transform` uses them.
        class_names: by class, or None where nobody named them.
    """

    name: str
    model: nn.Module
    transform: Callable[[Image.Image], Tensor]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    class_names: list[str] | None

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def batch(self, *images: Image.Image) -> Tensor:
        """RGB images to the model's input, (B, 3, H, W), on its device."""
        return torch.stack([self.transform(image) for image in images]).to(self.device)

    def picture(self, image: Tensor) -> Tensor:
        """The model's input (3, H, W) back to what a person sees of it, (H, W, 3) in [0, 1], on the CPU."""
        mean, std = (torch.tensor(values)[:, None, None] for values in (self.mean, self.std))
        return (image.cpu() * std + mean).clamp(0, 1).permute(1, 2, 0)

    def class_name(self, index: int) -> str:
        """The class's name, or its number where it has none."""
        return str(index) if self.class_names is None else self.class_names[index]


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what names a subject to a command line: MODEL, --checkpoint, --model-kwargs and --device."""
    parser.add_argument("model", metavar="MODEL", help="directory of a run, or a model that timm knows")
    parser.add_argument(
        "--checkpoint",
        metavar="WHICH",
        help="of a run: best (default) or last; of timm's models: a file of weights, pretrained (default) or random",
    )
    parser.add_argument(
        "--model-kwargs",
        nargs="+",
        default={},
        action=ParseKwargs,
        metavar="KEY=VALUE",
        help="of timm's models: arguments such as num_classes=10 img_size=64 patch_size=4",
    )
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda, cuda:1, ...")


def from_options(options: argparse.Namespace) -> Subject:
    """The subject that the command line names; raises as `load_subject`."""
    return load_subject(options.model, options.checkpoint, options.model_kwargs, options.device)


def load_subject(
    name: str, checkpoint: str | None = None, model_kwargs: dict[str, Any] | None = None, device: str = "auto"
) -> Subject:
    """Loads a model with what it needs to be asked about image files.

    Args:
        name: directory of a run, or a name of `timm.create_model`.
        checkpoint: of a run "best" (default) or "last"; else a file of weights, "pretrained" (default) or "random".
        model_kwargs: arguments of `timm.create_model`, none for a run, which has its own.
        device: as `run.device`.

    Raises:
        FileNotFoundError: there are no such weights.
        ValueError: no such model, weights of another model, or arguments that do not fit.
    """
    if Path(name).is_dir():
        found = _of_run(name, checkpoint or "best", model_kwargs)
    elif name.startswith(REMOTE) or name.partition(".")[0] in timm.list_models():
        found = _of_timm(name, checkpoint or "pretrained", model_kwargs or {})
    else:
        known = nearest(name, timm.list_models())
        raise ValueError(f"{name} is neither the directory of a run nor a model that timm knows; {known}")
    model, title, data, class_names = found
    transform = create_transform(**data, is_training=False)
    model.to(pick_device(device)).eval()
    return Subject(title, model, transform, data["mean"], data["std"], class_names)


def _of_run(name: str, checkpoint: str, model_kwargs: dict[str, Any] | None) -> tuple:
    if checkpoint not in ("best", "last"):
        raise ValueError(f"{name} is the directory of a run: its checkpoints are best and last, not {checkpoint!r}")
    if model_kwargs:
        raise ValueError(f"{name} is the directory of a run, which has the model's arguments: leave out --model-kwargs")
    model, record = load_run(name, checkpoint)
    data = preprocessing(load_config(Path(name) / "config.yaml").data)
    return model, f"{name} ({record['model']}, {checkpoint})", data, record.get("class_names")


def preprocessing(data: DataConfig) -> dict[str, Any]:
    """What `timm.data.create_transform` needs to make of an image file what a run measured its model on."""
    return dict(
        input_size=(3, data.image_size, data.image_size),
        mean=tuple(data.mean),
        std=tuple(data.std),
        crop_pct=data.crop_pct,
        interpolation={"area": "box"}.get(data.interpolation, data.interpolation),
    )


def _of_timm(name: str, checkpoint: str, model_kwargs: dict[str, Any]) -> tuple:
    file = None if checkpoint in ("pretrained", "random") else Path(checkpoint)
    if file is not None and not file.is_file():
        raise FileNotFoundError(f"there are no weights {file}: --checkpoint takes a file, pretrained or random")
    try:
        model = timm.create_model(name, pretrained=checkpoint == "pretrained", **model_kwargs)
    except (*REFUSALS, OSError) as error:
        given = f"{checkpoint} weights and {model_kwargs}"
        raise ValueError(f"timm cannot make {name} with {given} ({_brief(error)})") from error
    if getattr(model, "in_chans", 3) != 3:
        raise ValueError(f"{name} takes images of {model.in_chans} channels, but files are read as RGB, which has 3")
    class_names = None
    if file is not None:
        try:
            load_checkpoint(model, str(file))
        except (*REFUSALS, OSError, EOFError, pickle.UnpicklingError, SafetensorError) as error:
            raise ValueError(f"{file} does not hold weights of {name} with {model_kwargs} ({_brief(error)})") from error
        class_names = _names_in(file)
    elif checkpoint == "pretrained":
        class_names = _names_of_pretrained(model)
    if class_names is not None and len(class_names) != model.num_classes:
        raise ValueError(f"{name} has {model.num_classes} classes but its weights come with {len(class_names)} names")
    size = model_kwargs.get("img_size")
    size = {} if size is None else {"input_size": (3, *((size, size) if isinstance(size, int) else size))}
    data = resolve_model_data_config(model, size)
    return model, f"{name} ({checkpoint})", data, class_names


def _names_in(file: Path) -> list[str] | None:
    """Class names that a run of ours recorded in its weights; other files have none."""
    if file.suffix != ".safetensors":
        return None
    try:
        return load_weights(file)[1].get("class_names")
    except ValueError:  # safetensors of another program, which timm has just read
        return None


def _names_of_pretrained(model: nn.Module) -> list[str] | None:
    """Class names of published weights: their own, or ImageNet's where the head has the classes of one of its sets."""
    cfg = model.pretrained_cfg
    if model.num_classes != cfg.get("num_classes"):
        return None
    subset = infer_imagenet_subset(model)
    if cfg.get("label_names") or subset is None:
        return cfg.get("label_names") and list(cfg["label_names"])
    return ImageNetInfo(subset).label_descriptions()


def _brief(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) <= 300 else text[:297] + '...'}"


# What commands turn into one line and an exit status.
FAILURES = (ValueError, OSError, ImportError, yaml.YAMLError)
