"""This library's operators in exported files: where their library is, and how onnxruntime and AOTInductor call them."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import __version__
from ..ops.backends import cpu
from ..ops.validate import BlockArguments, ScanArguments
from .weights import quantize

DOMAIN = "vilonghorn"
OPSET_VERSION = 1
INTERFACE = 2  # kInterface of kernels/ort/node.h, which explains it
AOTI_LIBRARY = "vilonghorn.kernels"  # in a package of AOTInductor, which takes a name in .so for that of the model


def ort_library() -> Path:
    """Returns the shared library that files of `--to ort` need.

    Python registers it by `SessionOptions.register_custom_ops_library(str(ort_library()))`, C and C++ by
    `RegisterCustomOpsLibrary_V2`. It needs neither Python nor torch.

    Raises:
        FileNotFoundError: vilonghorn was installed without its native library; the message says how to build it.
    """
    if (reason := cpu.unavailable("cpu")) is not None:
        raise FileNotFoundError(f"the library that runs exported blocks is missing: {reason}")
    return Path(cpu.library._name)


def _symbolic(op: str, inputs: tuple[Tensor | None, ...], shape: Sequence[int], **attrs: Any) -> Tensor:
    attrs |= dict(interface=INTERFACE, version=__version__)
    return torch.onnx.ops.symbolic(
        f"{DOMAIN}::{op}", inputs, attrs, dtype=torch.float32, shape=shape, version=OPSET_VERSION
    )


def _block(*args: Any) -> tuple[Tensor, ...]:
    block, x = BlockArguments(*args[:-1]), args[0]
    if block.conv_grid:
        raise ValueError("an exported block has no convolution over a grid: compose it of its parts")
    options = dict(rule=block.rule, reverse=list(block.reverse), eps=block.eps)
    return _symbolic("Block", block[:11], x.shape, **options), *(x.new_empty(0) for _ in range(5))


def _scan(*args: Any) -> tuple[Tensor, ...]:
    scan = ScanArguments(*args[:-1])
    options = dict(rule=scan.rule, reverse=list(scan.reverse), mean=int(scan.reduce == "mean"))
    return _symbolic("Scan", scan[:8], scan.output_shape, **options), scan.x.new_empty(0)


def use_int8(graph: Any) -> None:
    """Makes each Block of an `onnx_ir.Graph` a BlockInt8: in_proj and out_proj in int8, with a scale for each row."""
    import onnx_ir

    def initializer(name: str, tensor: Tensor) -> onnx_ir.Value:
        value = onnx_ir.Value(name=name, const_value=onnx_ir.tensor(tensor.numpy(), name=name))
        graph.register_initializer(value)
        return value

    for node in [node for node in graph if (node.domain, node.op_type) == (DOMAIN, "Block")]:
        inputs, scales = list(node.inputs), []
        for i in map(BlockArguments._fields.index, ("in_proj", "out_proj")):
            weight = inputs[i]
            number, scale = quantize(torch.from_numpy(weight.const_value.numpy()))
            inputs[i] = initializer(f"{weight.name}.int8", number)
            scales.append(initializer(f"{weight.name}.scale", scale.squeeze(-1)))
            node.replace_input_with(i, None)
            if not weight.uses():
                graph.initializers.pop(weight.name)
        new = onnx_ir.Node(DOMAIN, "BlockInt8", [*inputs, *scales], node.attributes.values(), num_outputs=1)
        onnx_ir.convenience.replace_nodes_and_values(graph, node, [node], [new], node.outputs, new.outputs)


# For `ExportedProgram.run_decompositions`.
SYMBOLS = {torch.ops.vilonghorn.block.default: _block, torch.ops.vilonghorn.scan.default: _scan}


def aoti_functions() -> dict[Any, list[str]]:
    """Returns, by operator, the C++ functions that AOTInductor calls for it, as its `custom_ops_to_c_shims`.

    They open the library as AOTI_LIBRARY, beside the compiled model.

    Raises:
        FileNotFoundError: as `ort_library`, or the library is older than this package.
        NotImplementedError: on Windows.
    """
    if sys.platform == "win32":
        raise NotImplementedError("AOTInductor runs exported blocks on Linux and macOS; take --to ort or onnx here")
    folder, name = ort_library().parent, "vilonghorn_aoti.h"
    if not (folder / name).exists():
        raise FileNotFoundError(f"{folder / name} is missing: the library beside it is older, install vilonghorn again")
    header, functions = (folder / "vilonghorn.h").read_text(), (folder / name).read_text()
    code = functions.replace('#include "vilonghorn.h"\n', f'{header}#define VL_KERNELS "{AOTI_LIBRARY}"\n')
    # AOTInductor writes each text between "extern" and ";", inside extern "C".
    return {torch.ops.vilonghorn.block.default: [f'"C++" {{\n{code}}}'], torch.ops.vilonghorn.scan.default: []}
