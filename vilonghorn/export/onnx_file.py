"""Files of `--to onnx` and `--to ort`: ONNX, without or with operators of this library."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from ..ops import decomposed
from . import native
from .capture import input_shape

OPSET = 18  # of ONNX: torch's exporter is written for it


def write_onnx(program: ExportedProgram, path: Path, metadata: dict[str, str]) -> None:
    """Writes one ONNX file, from `images` (batch, channels, height, width) to `output`, or to maps."""
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass

    named = [feature["name"] for feature in json.loads(metadata.get("features", "[]"))] or ["output", "class_maps"]
    names = dict(input_names=["images"], output_names=named[: len(program.graph_signature.user_outputs)])
    with decomposed():  # layers that a user has changed have operators of this library
        onnx = torch.onnx.export(program, dynamo=True, opset_version=OPSET, verbose=False, **names)
    if metadata.get("weights") == '"int8"':
        native.use_int8(onnx.model.graph)
    [images], outputs = onnx.model.graph.inputs, onnx.model.graph.outputs
    batch, channels, height, width = images.shape
    symbols = {str(batch): "batch", **dict(zip(re.findall(r"s\d+", f"{height} {width}"), ("rows", "columns")))}
    has_any_size = not (isinstance(height, int) and isinstance(width, int))
    sides = ["height", "width"] if has_any_size else [height, width]
    images.shape = type(images.shape)([batch if isinstance(batch, int) else "batch", channels, *sides])
    for value in outputs:
        sizes = (re.sub(r"s\d+", lambda found: symbols.get(found[0], found[0]), str(size)) for size in value.shape)
        value.shape = type(value.shape)([int(size) if size.isdecimal() else size for size in sizes])
    ClearMetadataAndDocStringPass()(onnx.model)  # of each node: stack traces of the exporter
    if has_any_size and not any(use.node.op_type.startswith("Stem") for use in images.uses()):  # a Stem refuses them
        _refuse_part_patches(onnx.model.graph, program)
    excluded = [node.name for node in onnx.model.graph if not _is_layer(node)]
    onnx.model.metadata_props.update(metadata | {"quantize_exclude": json.dumps(excluded)})
    onnx.save(path, external_data=False)


def read_onnx(path: Path) -> dict[str, str]:
    """The metadata of a file, and its opset."""
    import onnx

    model = onnx.load(path, load_external_data=False)
    entries = {entry.key: entry.value for entry in model.metadata_props if entry.key != "quantize_exclude"}
    [opset] = [entry.version for entry in model.opset_import if not entry.domain]
    return entries | {"opset": str(opset)}


def _is_layer(node: Any) -> bool:
    """Whether a node is a convolution or a linear layer: all others lose accuracy in int8."""
    weight = node.inputs[1].const_value if node.op_type in ("Conv", "Gemm", "MatMul") else None
    return weight is not None and (node.op_type != "MatMul" or len(weight.shape) == 2)


def _refuse_part_patches(graph: Any, program: ExportedProgram) -> None:
    """Lets a runtime refuse images that are no whole number of patches, which a convolution would crop.

    ONNX has no assertion: the image is reshaped to the next size that fits, which fails unless that is its own.
    """
    import onnx_ir as ir

    [images], tape, (_, _, *sizes) = graph.inputs, ir.tape.Tape(), input_shape(program)
    sides = [size.node.expr for size in sizes]  # each is step * n + rest pixels for any n
    steps = [int(side.diff(*side.free_symbols)) for side in sides]
    rests = [int(side.subs({symbol: 0 for symbol in side.free_symbols})) for side in sides]
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
