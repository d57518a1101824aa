"""Captures a model as a graph of torch's operators, and writes the graph as ONNX, torch.export or AOTInductor."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from timm.data import resolve_model_data_config
from timm.layers import set_exportable
from torch.export import Dim, ExportedProgram

from ..models import VisionSSM

OPSET = 18  # of ONNX: torch's exporter is written for it, and it is the first with an antialiased Resize
MIN_GRID = 2  # rows and columns of patches: torch.export specialises dimensions of size 1


def image_size(model: VisionSSM, rows: int, columns: int) -> tuple[int, int]:
    """Returns height and width, in pixels, of an image of `rows` x `columns` patches."""
    (dy, dx), (height, width) = model.patch_embed.stride, model.patch_embed.patch_size
    return (rows - 1) * dy + height, (columns - 1) * dx + width


def capture(model: VisionSSM) -> ExportedProgram:
    """Captures a model of `load_for_export` for any number of images, and of patches in height and width."""
    embed, dims = model.patch_embed, {0: Dim("batch", min=1)}
    for dim, name, step, patch in zip((2, 3), ("rows", "columns"), embed.stride, embed.patch_size):
        size = Dim(name, min=MIN_GRID)
        size = size * step if step > 1 else size
        dims[dim] = size + (patch - step) if patch > step else size
    images = torch.zeros(2, model.in_chans, *embed.img_size)
    with torch.no_grad(), set_exportable(True):
        return torch.export.export(model, (images,), dynamic_shapes=(dims,), strict=False)


def describe(model: VisionSSM) -> dict[str, str]:
    """What a user of the file needs, each as JSON: the model's name, the names of its classes (or null), and the
    arguments of `timm.data.create_transform`, which turns a photograph into an input.
    """
    cfg = model.pretrained_cfg
    found = dict(
        model=cfg["architecture"], classes=cfg.get("label_names"), preprocessing=resolve_model_data_config(model)
    )
    return {name: json.dumps(value) for name, value in found.items()}


def write_onnx(program: ExportedProgram, path: Path, metadata: dict[str, str]) -> None:
    """Writes one ONNX file, from `images` (batch, channels, height, width) to `output`."""
    names = dict(input_names=["images"], output_names=["output"])
    onnx = torch.onnx.export(program, dynamo=True, opset_version=OPSET, verbose=False, **names)
    graph = onnx.model.graph
    batch, _, height, width = map(str, graph.inputs[0].shape)
    names = {batch: "batch", height: "height", width: "width"}
    for value in (*graph.inputs, *graph.outputs):
        value.shape = type(value.shape)([names.get(str(size), size) for size in value.shape])
    onnx.model.metadata_props.update(metadata)
    onnx.save(path, external_data=False)


def write_pt2(program: ExportedProgram, path: Path, metadata: dict[str, str]) -> None:
    """Writes the graph and the weights."""
    torch.export.save(program, path, extra_files=metadata)


def write_aoti(program: ExportedProgram, path: Path, metadata: dict[str, str]) -> None:
    """Compiles the graph and writes the machine code with the weights; changes `program`."""
    _pass_sizes_to_loops(program)
    settings = {"aot_inductor.metadata": metadata}
    torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=settings)


def _pass_sizes_to_loops(program: ExportedProgram) -> None:
    """Passes batch size, rows and columns of patches to every loop, as operands that it does not use.

    Inductor computes the sizes of a loop's results from the symbols in the loop's operands. It fails for the rows and
    columns of patches: the operands hold only their product, the number of tokens.
    """
    graph = program.graph_module.graph

    def is_patch_map(node: torch.fx.Node) -> bool:
        shape = getattr(node.meta.get("val"), "shape", ())
        return len(shape) == 4 and all(isinstance(n, torch.SymInt) and n.node.expr.is_Symbol for n in shape[2:])

    patches = next(filter(is_patch_map, graph.nodes))
    with graph.inserting_after(patches):
        sizes = [graph.call_function(torch.ops.aten.sym_size.int, (patches, dim)) for dim in (0, 2, 3)]
    for size in sizes:
        size.meta["val"] = patches.meta["val"].shape[size.args[1]]
    for loop in [node for node in graph.nodes if node.target is torch.ops.higher_order.scan]:
        body = getattr(program.graph_module, loop.args[0].target)
        last = [node for node in body.graph.nodes if node.op == "placeholder"][-1]
        with body.graph.inserting_before(last.next):
            for size in sizes:
                body.graph.placeholder(f"unused_{size.name}").meta["val"] = size.meta["val"]
        body.recompile()
        loop.args = (*loop.args[:3], (*loop.args[3], *sizes))
    program.graph_module.recompile()


class Format(NamedTuple):
    """A file format."""

    title: str
    suffix: str  # of file names
    write: Callable[[ExportedProgram, Path, dict[str, str]], None]


FORMATS = {
    "onnx": Format(f"ONNX, opset {OPSET}", ".onnx", write_onnx),
    "pt2": Format("torch.export", ".pt2", write_pt2),
    "aoti": Format("AOTInductor", ".aoti.pt2", write_aoti),
}
