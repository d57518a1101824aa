"""Captures a model as a graph of torch's operators, and writes the graph as ONNX, torch.export or AOTInductor."""

import copy
import hashlib
import json
import re
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import torch
from timm.data import resolve_model_data_config
from timm.models._features import FeatureGetterNet
from torch import nn
from torch.export import Dim, ExportedProgram

from ..layers.exportable import make_exportable
from ..models import Backbone
from . import native
from .attention import NEEDS, use_attention
from .weights import ShortWeights

OPSET = 18  # of ONNX: torch's exporter is written for it


def trunk(model: nn.Module) -> Backbone:
    """The model of this library in a model of `load_for_export`."""
    return model if isinstance(model, Backbone) else model.model


def min_grid(model: nn.Module) -> int:
    """Fewest rows and columns of patches of an image. torch.export specialises the size 1, also of the coarsest map."""
    return 1 + max(level["reduction"] for level in trunk(model).feature_info) // max(trunk(model).patches()[0])


def capture(
    model: nn.Module, keep_native: bool = False, weights: str = "fp32", scan: str = "standard"
) -> ExportedProgram:
    """Captures a model of `load_for_export` for any number of images, and of patches in height and width.

    With `keep_native`, blocks and scans are operators of this library, else of torch. `weights` is one of WEIGHTS. With
    scan "attention" a scan of the exact rule is the operator LinearAttention of onnxruntime.
    """
    least, dims = min_grid(model), {0: Dim("batch", min=1)}
    for dim, name, step, patch in zip((2, 3), ("rows", "columns"), *trunk(model).patches()):
        size = Dim(name, min=least)
        size = size * step if step > 1 else size
        dims[dim] = size + (patch - step) if patch > step else size
    # Primes, because Inductor fixes a size that equals another one, as 64 pixels do 64 channels.
    images = torch.zeros(2, trunk(model).in_chans, *trunk(model).image_size(max(least, 11), max(least, 13)))
    module = copy.deepcopy(model)
    use = native.use_operators if keep_native else use_attention if scan == "attention" else make_exportable
    module = use(module)
    if weights != "fp32":
        in_int8 = native.int8_layers(module) if weights == "int8" else ()
        module = ShortWeights(module, weights, in_int8)
    with torch.no_grad():
        return torch.export.export(module, (images,), dynamic_shapes=(dims,), strict=False)


def describe(model: nn.Module, weights: str = "fp32", scan: str = "standard") -> dict[str, str]:
    """What a user of the file needs, each as JSON: the model's name, the names of its classes (or null), and the
    arguments of `timm.data.create_transform`, which turns a photograph into an input; and the type of the weights. Of
    a model that returns maps also the name of each, its index, the channels and the pixels of the image to one of the
    map, and of a file with scan "attention" the runtime that it needs.
    """
    cfg = model.pretrained_cfg
    found = dict(
        model=cfg["architecture"],
        classes=cfg.get("label_names"),
        preprocessing=resolve_model_data_config(model),
        weights=weights,
    )
    if scan == "attention":
        found["needs"] = NEEDS
    if isinstance(model, FeatureGetterNet):
        columns = zip(model.out_indices, model.feature_info.channels(), model.feature_info.reduction())
        found["features"] = [
            dict(name=f"features_{i}", index=index, channels=channels, reduction=reduction)
            for i, (index, channels, reduction) in enumerate(columns)
        ]
    return {name: json.dumps(value) for name, value in found.items()}


def write_onnx(program: ExportedProgram, path: Path, metadata: dict[str, str]) -> None:
    """Writes one ONNX file, from `images` (batch, channels, height, width) to `output`, or to maps."""
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass

    outputs = [feature["name"] for feature in json.loads(metadata.get("features", "[]"))] or ["output", "class_maps"]
    outputs = outputs[: len(program.graph_signature.user_outputs)]
    names = dict(input_names=["images"], output_names=outputs)
    onnx = torch.onnx.export(program, dynamo=True, opset_version=OPSET, verbose=False, **names)
    if metadata.get("weights") == '"int8"':
        native.use_int8(onnx.model.graph)
    [images], outputs = onnx.model.graph.inputs, onnx.model.graph.outputs
    batch, channels, height, width = images.shape
    symbols = {str(batch): "batch", **dict(zip(re.findall(r"s\d+", f"{height} {width}"), ("rows", "columns")))}
    images.shape = type(images.shape)(["batch", channels, "height", "width"])
    for value in outputs:
        sizes = (re.sub(r"s\d+", lambda found: symbols.get(found[0], found[0]), str(size)) for size in value.shape)
        value.shape = type(value.shape)([int(size) if size.isdecimal() else size for size in sizes])
    ClearMetadataAndDocStringPass()(onnx.model)  # of each node: stack traces of the exporter
    _split_layers(onnx.model.graph)
    _refuse_part_patches(onnx.model.graph, *_image_sides(program))
    found = dict(digest=weights_digest(onnx.model.graph), quantize_exclude=_not_quantized(onnx.model.graph))
    onnx.model.metadata_props.update(metadata | {name: json.dumps(value) for name, value in found.items()})
    onnx.save(path, external_data=False)


def _split_layers(graph: Any) -> None:
    """Makes a linear layer whose outputs are split two layers: onnxruntime copies what it splits."""
    import onnx_ir as ir

    for split in [node for node in graph if node.op_type == "Split" and "num_outputs" in node.attributes]:
        layer = split.inputs[0].producer()
        weight = layer.inputs[1] if layer is not None and layer.op_type == "MatMul" else None
        if weight is None or weight.const_value is None or len(weight.uses()) > 1 or len(split.inputs[0].uses()) > 1:
            continue
        parts, layers, tape = weight.const_value.numpy(), [], ir.tape.Tape(graph)
        for i, part in enumerate(np.split(parts, len(split.outputs), axis=1)):
            value = tape.initializer(ir.tensor(np.ascontiguousarray(part)), f"{weight.name}_part_{i}")
            layers.append(ir.node("MatMul", [layer.inputs[0], value], name=f"{layer.name}_part_{i}"))
        new = [node.outputs[0] for node in layers]
        ir.convenience.replace_nodes_and_values(graph, layer, [split, layer], layers, split.outputs, new)
        graph.initializers.pop(weight.name)


def _not_quantized(graph: Any) -> list[str]:
    """Names of the nodes that lose accuracy in int8: all but convolutions and linear layers."""

    def is_layer(node: Any) -> bool:
        weight = node.inputs[1].const_value if node.op_type in ("Conv", "Gemm", "MatMul") else None
        return weight is not None and (node.op_type != "MatMul" or len(weight.shape) == 2)

    return [node.name for node in graph if not is_layer(node)]


def weights_digest(graph: Any) -> str:
    """SHA-256 of the names, types, shapes and values of the weights of an `onnx_ir.Graph`."""
    found = hashlib.sha256()
    for name, value in sorted(graph.initializers.items()):
        tensor = value.const_value
        found.update(f"{name} {tensor.dtype.name} {list(tensor.shape)}\n".encode())
        found.update(tensor.tobytes())
    return found.hexdigest()


def _image_sides(program: ExportedProgram) -> list[tuple[int, int]]:
    """(a, b) for height and for width of an image, which is a n + b pixels for any n."""
    [name] = program.graph_signature.user_inputs
    images = next(node for node in program.graph.nodes if node.name == name)
    sides = [side.node.expr for side in images.meta["val"].shape[2:]]
    return [(int(side.diff(*side.free_symbols)), int(side.subs({s: 0 for s in side.free_symbols}))) for side in sides]


def _refuse_part_patches(graph: Any, *sides: tuple[int, int]) -> None:
    """Lets a runtime refuse images that are no whole number of patches, which a convolution would crop.

    ONNX has no assertion: the image is reshaped to the next size that fits, which fails unless that is its own.
    """
    import onnx_ir as ir

    [images], tape, (steps, rests) = graph.inputs, ir.tape.Tape(), zip(*sides)
    uses = list(images.uses())
    size = tape.op("Shape", [images])
    over = tape.op("Sub", [tape.initializer(ir.tensor([0, 0, *rests]), "image_rests"), size])
    missing = tape.op("Mod", [over, tape.initializer(ir.tensor([1, 1, *steps]), "image_steps")])
    checked = tape.op("Reshape", [images, tape.op("Add", [size, missing])], name="images_must_be_whole_patches")
    checked.shape, checked.type = images.shape, images.type
    for use in uses:
        use.node.replace_input_with(use.idx, checked)
    for value in tape.initializers:
        graph.register_initializer(value)
    graph.insert_before(graph[0], tape.nodes)


def write_ort(program: ExportedProgram, path: Path, metadata: dict[str, str]) -> None:
    """Writes an ONNX file whose blocks are operators of `native.ort_library()`."""
    write_onnx(program.run_decompositions(native.SYMBOLS), path, metadata)


def write_pt2(program: ExportedProgram, path: Path, metadata: dict[str, str]) -> None:
    """Writes the graph and the weights."""
    # Of the guards only "whole patches" is a condition of the model. The others are assumptions about strides, which
    # change no result; torch cannot prove them where patches overlap, and the file would refuse a batch of one.
    program._guards_code = [guard for guard in program._guards_code if guard.endswith("== 0")]
    buffer = BytesIO()  # torch.export.save to a file hides why it cannot be written
    torch.export.save(program, buffer, extra_files=metadata)
    path.write_bytes(buffer.getvalue())


def write_aoti(program: ExportedProgram, path: Path, metadata: dict[str, str]) -> None:
    """Compiles the graph and writes the machine code with the weights, and the library of the operators beside it."""
    settings = {
        "aot_inductor.metadata": metadata,
        "aot_inductor.custom_ops_to_c_shims": native.aoti_functions(),
        "cpp.dynamic_threads": True,
    }
    buffer = BytesIO()
    program = program.run_decompositions(native.COMPOSED)
    torch._inductor.aoti_compile_and_package(program, package_path=buffer, inductor_configs=settings)
    with zipfile.ZipFile(buffer, "a") as package:
        [code] = [name for name in package.namelist() if name.endswith(".so")]
        package.write(native.ort_library(), str(PurePosixPath(code).with_name(native.AOTI_LIBRARY)))
    path.write_bytes(buffer.getvalue())


ORT_NEEDS = (
    "onnxruntime 1.17 or later, and libvilonghorn_cpu of this version, registered with the session before it opens the "
    "file. Where it is not, onnxruntime says: vilonghorn:Block(-1) is not a registered function/op (or Norm, or Scan)"
)


class Format(NamedTuple):
    """A file format."""

    title: str
    suffix: str  # of file names
    needs: str  # to run
    write: Callable[[ExportedProgram, Path, dict[str, str]], None]
    native: bool = False  # whether blocks and scans are operators of this library, else of torch

    @property
    def is_onnx(self) -> bool:
        """Whether onnxruntime runs the file, else torch."""
        return self.suffix.endswith(".onnx")


FORMATS = {
    "onnx": Format("ONNX", ".onnx", "onnxruntime, or another runtime of ONNX", write_onnx),
    "ort": Format("ONNX with operators of vilonghorn", ".ort.onnx", ORT_NEEDS, write_ort, True),
    "pt2": Format("torch.export", ".pt2", "torch", write_pt2),
    "aoti": Format("AOTInductor", ".aoti.pt2", "torch; it contains the kernels of vilonghorn", write_aoti, True),
}


def kind_of(path: Path) -> str | None:
    """The format of a file, by its name; None for other names."""
    kinds = [kind for kind, form in FORMATS.items() if path.name.endswith(form.suffix)]
    return max(kinds, key=lambda kind: len(FORMATS[kind].suffix), default=None)


def libraries(kind: str) -> list[str]:
    """Paths of what a file of this format needs beside its runtime."""
    return [str(native.ort_library())] if kind == "ort" else []
