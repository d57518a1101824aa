"""Loads a classifier with its preprocessing and class names, and classifies image files with it."""

import os
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from unicodedata import normalize

import timm
import torch
from PIL import Image
from safetensors import SafetensorError
from timm.data import create_transform, resolve_input_data_config
from timm.models import load_model_config_from_hf, parse_model_name
from timm.models._hub import load_model_config_from_path
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate
from torchvision.transforms import Compose

from .data.image_file import EXTENSIONS, MAX_PIXELS, explain_resize, printable, read_image, to_rgb
from .data.image_folder import list_images
from .data.loaders.config import CROP_MODES
from .data.loaders.processes import read_batches
from .engine import load_run
from .engine.config import nearest
from .engine.device import pick_device
from .engine.evaluate import check_names, name_weights, preprocessing, pretrained_class_names, recorded_transform
from .engine.model_setup import MODEL_ERRORS, explain_model_errors
from .models.weights_file import (
    check_architecture,
    check_file,
    check_numbers,
    is_ours,
    one_line,
    read_weights,
    recorded_input_size,
)

REMOTE = ("hf-hub:", "hf_hub:", "local-dir:")  # prefixes of names that timm looks up outside its registry
WITHOUT_FILE = ("pretrained", "random")  # weights of a timm model


@dataclass(frozen=True)
class LoadedModel:
    """A classifier in evaluation mode, on its device."""

    model: nn.Module
    preprocessing: dict[str, Any]  # arguments of `timm.data.create_transform`
    class_names: list[str] | None  # None if unknown
    architecture: str  # name of the timm model
    weights: str  # what they are, and of which run, without the folders above it

    @cached_property
    def transform(self) -> Callable[[Image.Image], Tensor]:
        """Converts any PIL image to the model's input (3, H, W): made RGB by `to_rgb`, resized, cropped, normalised."""
        return Compose([to_rgb, *create_transform(**self.preprocessing, is_training=False).transforms])

    @property
    def name(self) -> str:
        """The model and its weights, for messages."""
        return f"{self.architecture} with {self.weights}"

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return next(self.model.parameters()).device

    def denormalize(self, image: Tensor) -> Tensor:
        """Converts the model's input (3, H, W) to pixels (H, W, 3) in [0, 1], on the CPU."""
        mean, std = (torch.tensor(self.preprocessing[name])[:, None, None] for name in ("mean", "std"))
        return (image.cpu() * std + mean).clamp(0, 1).permute(1, 2, 0)

    def class_name(self, index: int) -> str:
        """Returns the name of a class as it can be printed (see `printable`), or its number if it has no name."""
        return str(index) if self.class_names is None else printable(self.class_names[index])

    def class_index(self, name: str) -> int:
        """Returns the number of a class, from its name in any Unicode form or its number as text; a name comes first.

        Raises ValueError if no class has this name, and it is not a number.
        """
        name, *names = (normalize("NFC", text) for text in (name, *(self.class_names or ())))
        if name in names:
            return names.index(name)
        try:
            return int(name)
        except ValueError:
            hint = nearest(name, names) if names else "the classes have numbers only"
            raise ValueError(f"{self.name} has no class {name!r}; {hint}") from None


def load(
    name: str | Path, checkpoint: str | None = None, model_kwargs: dict[str, Any] | None = None, device: str = "auto"
) -> LoadedModel:
    """Loads a classifier with its preprocessing and class names.

    Example::

        photos = vilonghorn.load("runs/photos")
        image = photos.transform(vilonghorn.read_image("a.jpg"))  # (3, H, W)
        with torch.inference_mode():
            scores = photos.model(image[None].to(photos.device))[0]  # (classes,)
        print(photos.class_name(int(scores.argmax())))

    Args:
        name: directory of a run, or a name that `timm.create_model` takes.
        checkpoint: of a run "best" (default) or "last"; of a timm model a file, "pretrained" (default) or "random".
        model_kwargs: arguments of `timm.create_model`, none for a run.
        device: "auto" (default: a GPU if there is one), "cpu", "cuda", "cuda:1", ...

    Raises:
        FileNotFoundError: there are no such weights.
        ValueError: unknown model, weights of another model, or arguments that do not fit.

    Warns if the classes are not those of the pretrained weights, so that the classifier is random.
    """
    name = str(name)
    if Path(name).is_dir():
        loaded = _load_run(name, checkpoint or "best", model_kwargs)
    elif name.startswith(REMOTE) or timm.is_model(name):
        loaded = _load_timm(name, checkpoint or "pretrained", model_kwargs or {})
    else:
        hint = nearest(name, timm.list_models())
        raise ValueError(f"{name} is neither the directory of a run nor a model that timm knows; {hint}")
    loaded.model.to(pick_device(device, "--device")).eval()
    return loaded


@torch.inference_mode()
def predict(
    loaded: LoadedModel,
    files: Iterable[str | os.PathLike],
    *,
    top: int = 5,
    batch_size: int = 32,
    workers: int = 0,
    max_pixels: int = MAX_PIXELS,
) -> Iterator[dict[str, Any]]:
    """Classifies image files in batches.

    Args:
        loaded: the model, of `load`.
        files: paths of images.
        top: number of classes for each image.
        batch_size: images in a batch.
        workers: processes that read images; with 0 this process reads them.
        max_pixels: a file of more pixels is an error.

    Yields:
        For each file, in order: {"image": file, "predictions": [{"class": number, "name": its name or None,
        "probability": 0 to 1}, ...]}, the most probable first; or {"image": file, "error": sentence}.

    Raises:
        ValueError: the model has no classes, does not take the images, or returns scores that are not finite.
        OSError: the disk fails, or a process that reads images.
    """
    if getattr(loaded.model, "num_classes", None) == 0:
        remedy = "give a model with classes, such as a run that was trained from it"
        raise ValueError(f"{loaded.name} has no classifier: {remedy}")
    read = partial(_read_batch, loaded.transform, max_pixels)
    loader = DataLoader([*map(os.fspath, files)], batch_size, num_workers=workers, collate_fn=read)
    with closing(read_batches(loader, "the images")) as batches:
        for results, images in batches:
            predictions = iter([] if images is None else _classify(loaded, images, top))
            for result in results:
                yield result if "error" in result else result | {"predictions": next(predictions)}


def create_model(name: str, checkpoint: str, model_kwargs: dict[str, Any]) -> tuple[nn.Module, list[str] | None]:
    """Makes a timm model as `load`; returns it with the names of its classes, None if unknown.

    A file of weights of a run has the arguments of its model and its preprocessing. Of a state dict for a model of this
    library, the head tells the number of classes. timm converts and resamples the weights.
    """
    file = None if checkpoint in WITHOUT_FILE else Path(checkpoint)
    architecture, record, transform, kwargs = _find_architecture(name), {}, {}, dict(model_kwargs)
    if file is not None:
        record, overlay = _read_file(file, name, architecture)
        transform = recorded_transform(record, file)
        kwargs = record.get("kwargs", {}) | kwargs
        if "num_classes" not in kwargs and is_ours(architecture):
            head = overlay["state_dict"].get(f"{timm.get_pretrained_cfg(architecture).classifier}.weight")
            kwargs["num_classes"] = len(head) if isinstance(head, Tensor) and head.dim() else 0
        if "num_classes" in kwargs:  # timm drops a head of another number of classes than the configuration's
            overlay["num_classes"] = kwargs["num_classes"]
        kwargs["pretrained_cfg_overlay"] = kwargs.get("pretrained_cfg_overlay", {}) | overlay
    numbers = {key: value for key, value in kwargs.items() if key != "pretrained_cfg_overlay"}
    check_numbers(architecture, numbers, "--model-kwargs")
    try:
        model = timm.create_model(name, pretrained=checkpoint != "random", **kwargs)
        model.pretrained_cfg.pop("state_dict", None)
        own = model_kwargs.get("pretrained_cfg_overlay", {})  # comes before the record
        model.pretrained_cfg.update({key: value for key, value in transform.items() if key not in own})
        return model, pretrained_class_names(model) if checkpoint == "pretrained" else record.get("class_names")
    except (*MODEL_ERRORS, OSError, EOFError, pickle.UnpicklingError, SafetensorError) as error:
        given = f"{checkpoint} weights" if file is None else f"the weights of {file}"
        hint = "; --checkpoint takes a file, pretrained or random" if checkpoint == "pretrained" else ""
        raise ValueError(f"timm cannot make {name} with {given} ({one_line(error)}){hint}") from error


def _find_architecture(name: str) -> str:
    """The name in timm's registry; of a folder or a repository of the Hub that of its config.json, which is checked."""
    if not name.startswith(REMOTE):
        return name.partition(".")[0]
    try:
        source, path = parse_model_name(name)
        is_folder = source == "local-dir"
        cfg, found, kwargs = (load_model_config_from_path if is_folder else load_model_config_from_hf)(path)
        check_architecture(found, kwargs or {}, name)
        check_numbers(found, {key: cfg.get(key) for key in ("input_size", "test_input_size")}, name)
        if is_folder:
            check_file(path)
    except (*MODEL_ERRORS, OSError) as error:
        raise ValueError(f"timm cannot make {name} ({one_line(error)})") from error
    return found


def _read_file(file: Path, name: str, architecture: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads a file of weights for a model.

    Returns what a run recorded, or nothing; and its entries of `pretrained_cfg_overlay`. Raises FileNotFoundError, or
    ValueError if it is no file of weights, is damaged, or has weights of another model than `name`, as far as both are
    in timm's registry.
    """
    weights, record = read_weights(file)
    overlay = {"state_dict": weights, "source": None}  # None: not the weights of a folder or of the Hub
    if record is None:
        return {}, overlay
    recorded = record.get("model", "no model")
    if not name.startswith(REMOTE) and recorded.partition(".")[0] != architecture:
        raise ValueError(f"{file} contains weights of {recorded}, not of {architecture}")
    kwargs = record.get("kwargs", {})
    check_architecture(architecture, kwargs, file, weights if "kwargs" in record else None)
    return record, overlay | recorded_input_size(kwargs)


def _load_run(name: str, checkpoint: str, model_kwargs: dict[str, Any] | None) -> LoadedModel:
    if model_kwargs:
        raise ValueError(f"{name} is the directory of a run, which has its own arguments: leave out --model-kwargs")
    transform = preprocessing(name)  # whose configuration may import the model
    model, record = load_run(name, checkpoint)
    weights = f"{name_weights(checkpoint, record)} of run {Path(name).resolve().name}"
    return LoadedModel(model, transform, record.get("class_names"), record["model"], weights)


def _load_timm(name: str, checkpoint: str, model_kwargs: dict[str, Any]) -> LoadedModel:
    model, class_names = create_model(name, checkpoint, model_kwargs)
    if not hasattr(model, "num_classes"):
        raise ValueError(f"{name} with {model_kwargs} returns maps, expected a classifier: leave out features_only")
    if model.num_classes < 0:  # timm would make no classifier
        raise ValueError(f"{name} has num_classes {model.num_classes}, expected 0 or more")
    if getattr(model, "in_chans", 3) != 3:
        raise ValueError(f"{name} takes images of {model.in_chans} channels, expected 3: files are read as RGB")
    check_names(name, model.num_classes, class_names)
    with explain_model_errors(f"the configuration of {name} gives no transform of images"):
        transform = resolve_input_data_config(model, {"model_kwargs": model_kwargs})
        create_transform(**transform)(Image.new("RGB", (8, 8)))
        if transform["crop_mode"] not in CROP_MODES:
            raise ValueError(f"crop_mode is {transform['crop_mode']!r}, expected one of {', '.join(CROP_MODES)}")
    architecture = Path(name).name if name.startswith("local-dir:") else name
    weights = f"{checkpoint} weights" if checkpoint in WITHOUT_FILE else f"weights of {Path(checkpoint).name}"
    if checkpoint == "pretrained" and model.num_classes not in (0, model.pretrained_cfg["num_classes"]):
        weights += f" and a random classifier of {model.num_classes} classes"  # timm drops that of the weights
        warnings.warn(f"{architecture} with {weights}: its predictions mean nothing until it is trained", stacklevel=3)
    return LoadedModel(model, transform, class_names, architecture, weights)


def _read_batch(
    transform: Callable[[Image.Image], Tensor], max_pixels: int, files: Sequence[str]
) -> tuple[list[dict[str, str]], Tensor | None]:
    """For each file its name, and an error if it cannot be read; and the model's input from the others."""
    results, images = [{"image": file} for file in files], []
    for file, result in zip(files, results):
        try:
            if os.path.isdir(file):
                found = "is a folder; give its images" if list_images(file)[0] else "no image in this folder"
                raise ValueError(f"{printable(file)}: {found}; expected names that end in {', '.join(EXTENSIONS)}")
            image = read_image(file, max_pixels)
            with explain_resize(file, image):
                images.append(transform(image))
        except ValueError as error:
            result["error"] = str(error)
    return results, default_collate(images) if images else None


def _classify(loaded: LoadedModel, images: Tensor, top: int) -> list[list[dict[str, Any]]]:
    """The predictions of each image of a batch (B, 3, H, W)."""
    with explain_model_errors(f"{loaded.name} does not take images {tuple(images.shape)}"):
        scores = loaded.model(images.to(next(loaded.model.parameters()))).float()  # its device and dtype
    if scores.dim() != 2:
        raise ValueError(f"{loaded.name} returns scores {tuple(scores.shape)}, expected (images, classes)")
    if not scores.isfinite().all():
        raise ValueError(f"{loaded.name} returns scores that are not finite numbers: its weights are damaged")
    values, classes = scores.softmax(1).topk(min(top, scores.shape[1]))
    names = loaded.class_names
    return [
        [{"class": c, "name": None if names is None else names[c], "probability": p} for c, p in zip(*pair)]
        for pair in zip(classes.tolist(), values.tolist())
    ]
