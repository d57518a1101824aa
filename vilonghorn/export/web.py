"""A folder for any web server: a page that classifies pictures in the browser and draws a class map over them."""

import json
import shutil
from pathlib import Path

from timm.models._features import FeatureGetterNet
from torch import Tensor, nn

from ..data.files import atomic_folder, write_json
from .formats import describe, trunk
from .verify import Errors, export

PAGE = Path(__file__).with_name("page")
VERSION = "1.30.0"  # of onnxruntime-web
FILES = ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm")  # that the page reads
RUNTIME = (
    f"npm pack onnxruntime-web@{VERSION}\n"
    f"tar -xzf onnxruntime-web-{VERSION}.tgz {' '.join(f'package/dist/{name}' for name in FILES)}"
)  # commands
INTERPOLATIONS = ("box", "bilinear", "bicubic", "lanczos")


class ClassMaps(nn.Module):
    """A model that also returns its class maps, (B, num_classes, h, w) (Zhou et al., arXiv 1512.04150).

    They are the classifier at each patch, without its bias: Grad-CAM after the last norm. Their mean is the score.
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
    if (pool := trunk(model).global_pool) == "avg":
        return None
    what = "one class token" if pool == "token" else f"patches by global_pool={pool!r}"
    return f"No class map: this model classifies {what}, and a map needs the average of the patches."


def write_page(model: nn.Module, folder: Path, weights: str = "fp32", scan: str | None = None) -> Errors:
    """Writes the folder, with the page, the model as ONNX (compared as by `export`) and its description as JSON.

    The model is of `load_for_export`, with classes. The files of the runtime are not in it: RUNTIME has the commands.

    Raises:
        FileExistsError: `folder` exists and is not empty.
        ValueError: a model without classes, of images without three channels, or of a resampling that the page lacks.
        VerificationError: as `export`.
    """
    found = {name: json.loads(value) for name, value in describe(model, weights).items()}
    if isinstance(model, FeatureGetterNet) or not model.num_classes or model.in_chans != 3:
        raise ValueError("--to web is for a classifier of images in RGB: leave out --features, and give classes")
    if (name := found["preprocessing"]["interpolation"]) not in INTERPOLATIONS:
        raise ValueError(f"interpolation is {name!r}, expected one of {', '.join(INTERPOLATIONS)} for --to web")
    with atomic_folder(folder) as partial:
        exported = model if (reason := without_maps(model)) else ClassMaps(model)
        errors = export(exported, "onnx", partial / "model.onnx", weights, scan)
        write_json(partial / "model.json", found | dict(runtime=RUNTIME, without_maps=reason))
        for file in PAGE.iterdir():
            shutil.copyfile(file, partial / file.name)
    return errors
