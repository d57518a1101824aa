"""A folder for any web server: a page that classifies pictures in the browser and draws Grad-CAM over them."""

import json
import shutil
import tarfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from timm.layers import to_2tuple
from timm.models._features import FeatureGetterNet
from torch import Tensor, nn
from torchvision.transforms.functional import to_pil_image

from ..data import create_loader
from ..data.atomic_files import atomic_folder, exits_on_sigterm, write_json
from ..data.image_file import read_image
from ..engine.evaluate import load_config, run_config
from .capture import backbone, describe
from .verify import Errors, export

PAGE = Path(__file__).with_name("page")
RUNTIME = "onnxruntime-web-1.30.0.tgz"
RUNTIME_URL = f"https://registry.npmjs.org/onnxruntime-web/-/{RUNTIME}"
RUNTIME_SHA256 = "d2228df7e4616bc3348bf504ee888f3bec43789a273f0a63f3e68d203ce3bf71"
RUNTIME_FILES = ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm")  # that the page reads
INTERPOLATIONS = ("box", "bilinear", "bicubic", "lanczos")
SIDE = 512  # largest of an example


class ClassMaps(nn.Module):
    """A model that also returns its class maps, (B, num_classes, h, w) (Zhou et al., arXiv 1512.04150).

    They are the classifier at each patch, without its bias; their positive part is Grad-CAM after the last norm. Their
    mean is the score.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.pretrained_cfg = model, model.pretrained_cfg

    def forward(self, x: Tensor) -> list[Tensor]:
        """(B, in_chans, H, W) images to logits and maps."""
        features, [tokens] = self.model.forward_intermediates(x, indices=1, norm=True)
        weight = self.model.get_classifier().weight
        return [self.model.forward_head(features), nn.functional.conv2d(tokens, weight[:, :, None, None])]


def without_maps(model: nn.Module) -> str | None:
    """Why a model has no class maps; None for one that classifies the average of its patches, as their means."""
    if (pool := backbone(model).global_pool) == "avg":
        return None
    what = "one class token" if pool == "token" else f"patches by global_pool={pool!r}"
    return f"No Grad-CAM: this model classifies {what}, and the page draws it of the average of the patches."


def fetch_runtime() -> Path:
    """The archive of onnxruntime-web (33 MB, MIT licence), which is downloaded once, into the folder of torch.hub.

    Raises OSError without a connection, or if the download has another SHA-256 than expected.
    """
    path = Path(torch.hub.get_dir(), RUNTIME)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with exits_on_sigterm():
                torch.hub.download_url_to_file(RUNTIME_URL, str(path), hash_prefix=RUNTIME_SHA256)
        except (OSError, RuntimeError) as error:
            remedy = f"without a connection, copy this file to {path.parent}"
            raise OSError(f"the page needs {RUNTIME_URL} ({error}); {remedy}") from error
    return path


def read_examples(model: str, files: Sequence[Path] | None = None) -> list[Image.Image]:
    """Reads the pictures of a page: `files`, or if `model` is a run three of its images, held-out ones with `data.val`.

    Raises ValueError if one of `files` cannot be read. Warns if those of a run cannot.
    """
    if files or not Path(model).is_dir():
        return [read_image(file) for file in files or ()]
    data = load_config(run_config(model)).data
    if data.held_out is None:  # the run had loaders of its own
        return []
    side = min(SIDE, 2 * max(to_2tuple(data.image_size)))
    options = dict(training=False, labelled=False, batch_size=3, image_size=side, workers=0)
    options |= dict(mean=(0, 0, 0), std=(1, 1, 1), crop_pct=1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a loader says of classes and crops, which a page does not use
            step = max(1, create_loader(data.held_out, **options).num_samples // 3)  # evenly spaced
            images, _ = next(create_loader(data.held_out, rank=step // 2, world_size=step, **options).epoch(0))
    except (ImportError, OSError, ValueError) as error:
        warnings.warn(f"no examples from data.val of the run ({error}); choose some by --examples", stacklevel=2)
        return []
    return [to_pil_image(image) for image in images]


def write_page(model: nn.Module, folder: Path, examples: Sequence[Image.Image] = (), **options: Any) -> Errors:
    """Writes the folder: page, model as ONNX (compared as by `export`), its description as JSON, and onnxruntime-web.

    The model is of `load_for_export`, with classes. `examples` are reduced to SIDE, in place, and stored as JPEG.
    `options` are precision and scan of `export`. Raises FileExistsError if `folder` exists and is not empty, ValueError
    for a model without classes, of images without three channels, or of a resampling that the page lacks, OSError as
    `fetch_runtime`, and VerificationError as `export`.
    """
    found = {name: json.loads(value) for name, value in describe(model, options.get("precision", "fp32")).items()}
    if isinstance(model, FeatureGetterNet) or not model.num_classes or model.in_chans != 3:
        raise ValueError("a web page needs a classifier of images in RGB: give a model with classes, no --features")
    if (name := found["preprocessing"]["interpolation"]) not in INTERPOLATIONS:
        raise ValueError(f"interpolation is {name!r}, expected one of {', '.join(INTERPOLATIONS)} for --to web")
    with tarfile.open(fetch_runtime()) as runtime, atomic_folder(folder) as partial:
        exported = model if (reason := without_maps(model)) else ClassMaps(model)
        errors = export(exported, "onnx", partial / "model.onnx", **options)
        for number, picture in enumerate(examples):
            picture.thumbnail((SIDE, SIDE))
            picture.save(partial / f"example-{number}.jpg", quality=95)
        more = dict(num_classes=model.num_classes, without_maps=reason, examples=len(examples))
        write_json(partial / "model.json", found | more)
        for file in PAGE.iterdir():
            shutil.copyfile(file, partial / file.name)
        for name in RUNTIME_FILES:
            (partial / name).write_bytes(runtime.extractfile(f"package/dist/{name}").read())
    return errors
