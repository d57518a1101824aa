"""Captures a model as a graph of torch's operators, and describes it for the users of a file."""

import copy
import json
import logging
from typing import Any

import torch
from timm.data import resolve_model_data_config
from timm.models._features import FeatureGetterNet
from torch import nn
from torch.export import Dim, ExportedProgram

from ..layers.exportable import make_exportable
from ..models import Backbone
from ..ops import decomposed
from . import native
from .attention import NEEDS, use_attention
from .precision import ShortWeights

logger = logging.getLogger(__name__)
BATCH_SIZES = (1, 2, 5)  # of the comparison, where a file takes any number of images


def backbone(model: nn.Module) -> Backbone:
    """The model of this library in a model of `load_for_export`, for which `has_backbone` is true."""
    return getattr(model, "model", model)  # that of a FeatureGetterNet, or the model itself


def has_backbone(model: nn.Module) -> bool:
    """Whether a model of `load_for_export` is of this library, not of another package."""
    return isinstance(backbone(model), Backbone)


def min_grid(model: nn.Module) -> int:
    """Fewest rows and columns of patches of an image. torch.export specialises the size 1, also of the coarsest map."""
    return 1 + max(level["reduction"] for level in backbone(model).feature_info) // max(backbone(model).patches()[0])


def capture(
    model: nn.Module, keep_native: bool = False, precision: str = "fp32", scan: str = "standard", fixed: bool = False
) -> ExportedProgram:
    """Captures a model of `load_for_export` for any number of images, and of patches in height and width.

    With `keep_native`, layers are operators of `ort_library` for ONNX, else of torch. `precision` is one of PRECISIONS.
    With scan "attention" a scan of the exact rule is the operator LinearAttention of onnxruntime. A `fixed` graph is
    for one image of the model's size, and a scan of the exact rule with heads is no loop in it.

    A model of another package is captured without these options, for images of its own size, and for one image if its
    code fixes the number of images.
    """
    if not has_backbone(model):
        return _capture_other(model, fixed)
    net, least, dims = backbone(model), min_grid(model), {0: Dim("batch", min=1)}
    for dim, name, step, patch in zip((2, 3), ("rows", "columns"), *net.patches()):
        size = Dim(name, min=least)
        size = size * step if step > 1 else size
        dims[dim] = size + (patch - step) if patch > step else size
    # Primes, because Inductor fixes a size that equals another one, as 64 pixels do 64 channels.
    images = torch.zeros(2, net.in_chans, *net.image_size(max(least, 11), max(least, 13)))
    use = native.use_operators if keep_native else use_attention if scan == "attention" else make_exportable
    module = use(copy.deepcopy(model))
    if precision != "fp32":
        in_int8 = native.int8_layers(module) if precision == "int8" else ()
        module = ShortWeights(module, precision, in_int8)
    with torch.no_grad():
        if fixed:
            images = torch.zeros(1, net.in_chans, *net.image_size(*net.grid_size()))
            return torch.export.export(module, (images,), strict=False)
        return torch.export.export(module, (images,), dynamic_shapes=(dims,), strict=False)


def _capture_other(model: nn.Module, fixed: bool) -> ExportedProgram:
    shape = model.pretrained_cfg["input_size"]  # type: ignore[index]
    options: dict[str, Any] = dict(dynamic_shapes=(None if fixed else {0: Dim("batch")},), strict=False)
    with torch.no_grad(), decomposed():
        try:
            return torch.export.export(model, (torch.zeros(2 - fixed, *shape),), **options)
        except RuntimeError as error:
            if "batch" not in str(error):
                raise
            logger.info("the model's code fixes the number of images: the file takes one image at a time")
            return torch.export.export(model, (torch.zeros(1, *shape),), strict=False)


def input_shape(program: ExportedProgram) -> torch.Size:
    """The shape of the images that a captured model takes; a size that may change is a torch.SymInt."""
    [name] = program.graph_signature.user_inputs
    return next(node for node in program.graph.nodes if node.name == name).meta["val"].shape


def compared_shapes(model: nn.Module, program: ExportedProgram) -> list[tuple[int, ...]]:
    """Shapes of images by which a file is compared with its model: of its own size, and of a wider one if it may be."""
    count, channels, *size = input_shape(program)
    sizes = [size]
    if not all(isinstance(side, int) for side in size):
        least, net = min_grid(model), backbone(model)
        rows, columns = (max(least, side) for side in net.grid_size())
        sizes = [net.image_size(rows, columns), net.image_size(max(least, 3 * rows // 4), columns + 3)]
    counts = (count,) if isinstance(count, int) else BATCH_SIZES
    return [(count, channels, *size) for size in sizes for count in counts]


def describe(model: nn.Module, precision: str = "fp32", scan: str = "standard") -> dict[str, str]:
    """What a user of the file needs, each as JSON: the model's name, the names of its classes (or null), how image
    files are read, the arguments of `timm.data.create_transform`, which turns what was read into an input, and the type
    of the weights. Of a model that returns maps, and so has no classes, also the name of each, its index, the channels
    and the pixels of the image to one of the map, and of a file with scan "attention" the runtime that it needs.
    """
    cfg, net, preprocessing = model.pretrained_cfg, backbone(model), resolve_model_data_config(model)
    if has_backbone(model):  # whose configuration may have another size than the model
        preprocessing["input_size"] = (net.in_chans, *net.image_size(*net.grid_size()))
    names = cfg.get("label_names") or None
    if names and getattr(net, "num_classes", len(names)) != len(names):
        names = None  # a model of timm with another number of classes keeps the names of the published weights
    found = dict(
        model=cfg["architecture"],
        classes=names,
        # As `data.image_file.to_rgb` reads a file, for readers in other languages.
        reading=dict(orientation="exif", channels="RGB", bits=8, background=[255, 255, 255], gray16="value >> 8"),
        preprocessing=preprocessing,
        weights=precision,
    )
    if scan == "attention":
        found["needs"] = NEEDS
    if isinstance(model, FeatureGetterNet):
        columns = zip(model.out_indices, model.feature_info.channels(), model.feature_info.reduction())
        found["classes"] = None
        found["features"] = [
            dict(name=f"features_{i}", index=index, channels=channels, reduction=reduction)
            for i, (index, channels, reduction) in enumerate(columns)
        ]
    return {name: json.dumps(value) for name, value in found.items()}
