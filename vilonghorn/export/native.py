"""This library's operators in exported files: where their library is, and how onnxruntime and AOTInductor call them."""

import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import __version__
from ..layers import Block, fast_block
from ..layers.exportable import ExportableMixer, ExportableNorm, make_exportable, replace_classes
from ..ops.arguments import LAYOUTS, BlockArguments, NormArguments, ScanArguments, named_tensors, tensors, unflatten
from ..ops.backends import cpu
from ..ops.block import run_block
from ..ops.exportable import rms_norm_exportable
from ..ops.norm import run_norm
from ..ops.scan import scan
from .weights import quantize

DOMAIN = "vilonghorn"
OPSET_VERSION = 1
INTERFACE = 4  # kInterface of kernels/ort/node.h, which explains it
NUM_INPUTS = 15  # of a Block: the tensors of BlockArguments, with conv_grid in place of drop_scales
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


class NativeBlock(Block):
    """A block that is one operator in the exported graph."""

    def forward(self, x: Tensor, grid: list[int] | None = None) -> Tensor:
        """As `Block.forward`."""
        return run_block(fast_block.block_arguments(self, x, grid, False))


class NativeMixer(ExportableMixer):
    """A mixer whose scan is one operator in the exported graph."""

    scan_function = staticmethod(lambda args: scan(**args._replace(backend=cpu.NAME)._asdict()))


class NativeNorm(ExportableNorm):
    """A norm that is one operator in the exported graph."""

    def forward(self, x: Tensor) -> Tensor:
        """As `RMSNorm.forward`."""
        return run_norm(NormArguments(x, self.weight, self.eps))


def use_operators(model: nn.Module) -> nn.Module:
    """Replaces the classes of blocks, mixers and norms in a model, in place, and returns it."""
    blocks = [module for module in model.modules() if type(module) is Block and fast_block.is_one_operator(module)]
    replace_classes(make_exportable(model), {ExportableMixer: NativeMixer, ExportableNorm: NativeNorm})
    for block in blocks:
        block.__class__ = NativeBlock
    return model


def int8_layers(model: nn.Module) -> list[str]:
    """Names of the weights that `--to ort --weights int8` multiplies in int8, those of each NativeBlock."""
    blocks = [(name, module) for name, module in model.named_modules() if isinstance(module, NativeBlock)]
    parts = chain.from_iterable(block.named_modules(prefix=name) for name, block in blocks)
    return [f"{name}.weight" for name, part in parts if type(part) is nn.Linear]


def _symbolic(op: str, inputs: tuple[Tensor | None, ...], shape: Sequence[int], **attrs: Any) -> Tensor:
    attrs |= dict(interface=INTERFACE, version=__version__)
    return torch.onnx.ops.symbolic(
        f"{DOMAIN}::{op}", inputs, attrs, dtype=torch.float32, shape=shape, version=OPSET_VERSION
    )


def _block(*flat: Any) -> tuple[Tensor, ...]:
    block = unflatten(BlockArguments, flat)
    options = dict(rule=block.rule, reverse=list(block.reverse), eps=block.eps, mlp_eps=block.mlp_eps)
    rows, columns, height, _ = block.conv_grid or [None] * 4
    grid = [torch.scalar_tensor(size, dtype=torch.int64) for size in (rows, columns, height) if size is not None]
    weights = [t for name, t in named_tensors(block).items() if name != "drop_scales"]
    y = _symbolic("Block", (*weights, torch.stack(grid) if grid else None), block.x.shape, **options)
    return y, *(block.x.new_empty(0) for _ in range(5))


def _scan(*flat: Any) -> tuple[Tensor, ...]:
    scan = unflatten(ScanArguments, flat)
    options = dict(rule=scan.rule, reverse=list(scan.reverse), mean=int(scan.reduce == "mean"))
    return _symbolic("Scan", tuple(tensors(scan)), scan.output_shape, **options), scan.x.new_empty(0)


def _norm(x: Tensor, weight: Tensor, eps: float, _: bool) -> tuple[Tensor, Tensor]:
    return _symbolic("Norm", (x, weight), x.shape, eps=eps), x.new_empty(0)


def _composed_norm(x: Tensor, weight: Tensor, eps: float, _: bool) -> tuple[Tensor, Tensor]:
    return rms_norm_exportable(x, weight, eps), x.new_empty(0)


def use_int8(graph: Any) -> None:
    """Makes each Block of an `onnx_ir.Graph` a BlockInt8: linear layers in int8, with a scale for each row."""
    import onnx_ir

    tape = onnx_ir.tape.Tape(graph)
    for node in [node for node in graph if (node.domain, node.op_type) == (DOMAIN, "Block")]:
        inputs, scales = [*node.inputs, *[None] * (NUM_INPUTS - len(node.inputs))], []
        for i in map(LAYOUTS[BlockArguments].tensors.index, ("in_proj", "out_proj", "mlp_in_proj", "mlp_out_proj")):
            if (weight := inputs[i]) is None:
                scales.append(None)
                continue
            number, scale = quantize(torch.from_numpy(weight.const_value.numpy()))
            inputs[i] = tape.initializer(onnx_ir.tensor(number.numpy()), f"{weight.name}.int8")
            scales.append(tape.initializer(onnx_ir.tensor(scale.squeeze(-1).numpy()), f"{weight.name}.scale"))
            node.replace_input_with(i, None)
            if not weight.uses():
                graph.initializers.pop(weight.name)
        new = onnx_ir.Node(DOMAIN, "BlockInt8", [*inputs, *scales], node.attributes.values(), num_outputs=1)
        onnx_ir.convenience.replace_nodes_and_values(graph, node, [node], [new], node.outputs, new.outputs)


# For `ExportedProgram.run_decompositions`. SYMBOLS writes operators for onnxruntime. COMPOSED is for AOTInductor, which
# fuses a norm with its neighbors.
_OPS = torch.ops.vilonghorn
SYMBOLS = {_OPS.block.default: _block, _OPS.scan.default: _scan, _OPS.rms_norm_cpu.default: _norm}
COMPOSED = {_OPS.rms_norm_cpu.default: _composed_norm}


def aoti_functions() -> dict[Any, list[str]]:
    """Returns, by operator, the C++ functions that AOTInductor calls for it, as its `custom_ops_to_c_shims`.

    They open the library as AOTI_LIBRARY, beside the compiled model.

    Raises:
        OSError: there is no C++ compiler, no `ort_library`, or one that is older than this package; or this is Windows.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    if sys.platform == "win32":
        raise OSError("AOTInductor runs exported blocks on Linux and macOS; take --to ort or onnx here")
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise FileNotFoundError("--to aoti needs a C++ compiler: install g++ or set CXX") from None
    folder, name = ort_library().parent, "vilonghorn_aoti.h"
    if not (folder / name).exists():
        raise FileNotFoundError(f"{folder / name} is missing: the library beside it is older, install vilonghorn again")
    header, functions = (folder / "vilonghorn.h").read_text(), (folder / name).read_text()
    code = functions.replace('#include "vilonghorn.h"\n', f'{header}#define VL_KERNELS "{AOTI_LIBRARY}"\n')
    # AOTInductor writes each text between "extern" and ";", inside extern "C".
    return {_OPS.block.default: [f'"C++" {{\n{code}}}'], _OPS.scan.default: []}
