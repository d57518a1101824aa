"""From a model to a file that other programs run: capture as a graph of torch's operators, and a writer for each format.

What is in the files, and whether they are right, is the command's to say (`export`); how they are run, `export_runtime`'s.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path

import torch
from timm.layers import set_exportable
from torch.export import Dim, ExportedProgram
from torch.fx import Node

from vilonghorn.models import VisionSSM

OPSET = 18  # of ONNX: the first whose Resize is antialiased, and the one that torch's exporter is written in
SMALLEST_GRID = 2  # rows and columns of patches: torch.export keeps sizes of 1 apart


def image_sizes(model: VisionSSM, rows: int, columns: int) -> tuple[int, int]:
    """Height and width, in pixels, of an image of so many patches."""
    embed = model.patch_embed
    sides = ((n - 1) * s + p for n, s, p in zip((rows, columns), embed.stride, embed.patch_size))
    return next(sides), next(sides)


def capture(model: VisionSSM) -> ExportedProgram:
    """A model as a graph of torch's operators, for any number of images and of patches in height and width.

    Args:
        model: made with `dynamic_img_size=True`, in evaluation mode, its parameters frozen.
    """
    (height, width), embed = model.patch_embed.img_size, model.patch_embed
    sides = {}
    for i, name in enumerate(("rows", "columns")):
        step, over = embed.stride[i], embed.patch_size[i] - embed.stride[i]
        side = Dim(name, min=SMALLEST_GRID)
        side = side * step if step > 1 else side
        sides[2 + i] = side + over if over else side
    images = torch.zeros(2, model.in_chans, height, width)
    with torch.no_grad(), set_exportable(True):
        return torch.export.export(model, (images,), dynamic_shapes=({0: Dim("batch", min=1), **sides},), strict=False)


def write_onnx(program: ExportedProgram, path: Path) -> None:
    """ONNX of opset OPSET: images (batch, channels, height, width) to output, in one file."""
    onnx = torch.onnx.export(
        program,
        dynamo=True,
        opset_version=OPSET,
        input_names=["images"],
        output_names=["output"],
        verbose=False,
    )
    graph = onnx.model.graph
    old = graph.inputs[0].shape
    names = {str(old[i]): name for i, name in ((0, "batch"), (2, "height"), (3, "width"))}
    for value in (*graph.inputs, *graph.outputs):
        value.shape = type(old)([names.get(str(size), size) for size in value.shape])
    onnx.save(path, external_data=False)


def write_pt2(program: ExportedProgram, path: Path) -> None:
    """What `torch.export.load` reads."""
    torch.export.save(program, path)


def write_aoti(program: ExportedProgram, path: Path) -> None:
    """Machine code of the graph, compiled here, and the weights; `program` is changed on the way."""
    _tell_loops_the_sizes(program)
    torch._inductor.aoti_compile_and_package(program, package_path=str(path))


WRITERS: dict[str, Callable[[ExportedProgram, Path], None]] = {"onnx": write_onnx, "pt2": write_pt2, "aoti": write_aoti}
SUFFIXES = {"onnx": ".onnx", "pt2": ".pt2", "aoti": ".pt2"}


def _tell_loops_the_sizes(program: ExportedProgram) -> None:
    """Gives every loop the image's sizes as operands that it does not use.

    Inductor makes room for a loop's results with sizes that it computes from the loop's own operands, and fails where a
    symbol of them is not among those: the rows and columns of patches, of which the loop knows only the product.
    """
    graph = program.graph_module.graph
    name = program.graph_signature.user_inputs[0]
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    image = next(node for node in inputs if node.name == name)
    sizes = []
    with graph.inserting_before(inputs[-1].next):
        for dim in (0, 2, 3):
            size = _call(graph, torch.ops.aten.sym_size.int, image, dim)
            sizes.append(size)
            symbols = size.meta["val"].node.expr
            if not symbols.is_Symbol:  # step * symbol + over: the symbol itself is wanted
                step = int(symbols.diff(next(iter(symbols.free_symbols))))
                over = int(symbols.subs(next(iter(symbols.free_symbols)), 0))
                sizes[-1] = _call(graph, operator.floordiv, _call(graph, operator.sub, size, over), step)
    for node in list(graph.nodes):
        if node.target is torch.ops.higher_order.scan:
            body = getattr(program.graph_module, node.args[0].target)
            last = [inner for inner in body.graph.nodes if inner.op == "placeholder"][-1]
            with body.graph.inserting_before(last.next):
                for size in sizes:
                    body.graph.placeholder(f"unused_{size.name}").meta["val"] = size.meta["val"]
            body.recompile()
            node.args = (*node.args[:3], (*node.args[3], *sizes))
    program.graph_module.recompile()


def _call(graph: torch.fx.Graph, function: Callable, *args: Node | int) -> Node:
    """A node that computes a size, with the value that the graph's other passes look for."""
    node = graph.call_function(function, args)
    values = [arg.meta["val"] if isinstance(arg, Node) else arg for arg in args]
    node.meta["val"] = values[0].shape[values[1]] if function is torch.ops.aten.sym_size.int else function(*values)
    return node
