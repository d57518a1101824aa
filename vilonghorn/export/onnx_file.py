"""Files of `--to onnx` and `--to ort`: ONNX, without or with operators of this library."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram

from . import native

OPSET = 18  # of ONNX: torch's exporter is written for it


def write_onnx(program: ExportedProgram, path: Path, metadata: dict[str, str]) -> None:
    """Writes one ONNX file, from `images` (batch, channels, height, width) to `output`, or to maps."""
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass

    named = [feature["name"] for feature in json.loads(metadata.get("features", "[]"))] or ["output", "class_maps"]
    outputs = [name for name, _ in zip(named, program.graph_signature.user_outputs)]
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
    onnx.model.metadata_props.update(metadata | {"quantize_exclude": json.dumps(_not_quantized(onnx.model.graph))})
    onnx.save(path, external_data=False)


def write_ort(program: ExportedProgram, path: Path, metadata: dict[str, str]) -> None:
    """Writes an ONNX file whose blocks are operators of `native.ort_library()`."""
    write_onnx(program.run_decompositions(native.SYMBOLS), path, metadata)


def read_onnx(path: Path) -> dict[str, str]:
    """The metadata of a file, and its opset."""
    import onnx

    model = onnx.load(path, load_external_data=False)
    entries = {entry.key: entry.value for entry in model.metadata_props if entry.key != "quantize_exclude"}
    [opset] = [entry.version for entry in model.opset_import if not entry.domain]
    return entries | {"opset": str(opset)}


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


def _image_sides(program: ExportedProgram) -> list[tuple[int, int]]:
    """(a, b) for height and for width of an image, which is a n + b pixels for any n."""
    [name] = program.graph_signature.user_inputs
    images = next(node for node in program.graph.nodes if node.name == name)
    _, _, *sizes = images.meta["val"].shape
    sides = [size.node.expr for size in sizes]
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
