"""This library's operators in exported files: where their library is, and how onnxruntime calls them."""

from collections.abc import Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import __version__
from ..layers import Block, Mixer, fast_block
from ..layers.exportable import ExportableMixer, replace_classes
from ..ops.arguments import BlockArguments, ScanArguments, named_tensors, tensors, unflatten
from ..ops.backends import cpu
from ..ops.backends.bindings import BLOCK_WEIGHTS
from ..ops.block import run_block
from ..ops.scan import scan
from .precision import quantize

DOMAIN = "vilonghorn"
OPSET_VERSION = 1
INTERFACE = 4  # kInterface of kernels/ort/node.h, which explains it
BLOCK_INPUTS = (*BLOCK_WEIGHTS, "conv_grid")


def ort_library() -> Path:
    """Returns the shared library that files of `--to ort` need.

    Python registers it by `SessionOptions.register_custom_ops_library(str(ort_library()))`, C and C++ by
    `RegisterCustomOpsLibrary_V2`. It needs neither Python nor torch. Raises FileNotFoundError if vilonghorn was
    installed without its native library; the message says how to build it.
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


def use_operators(model: nn.Module) -> nn.Module:
    """Replaces the classes of blocks and mixers in a model, in place, and returns it. A norm is an operator already."""
    for module in model.modules():
        if type(module) is Block and fast_block.is_one_operator(module):
            module.__class__ = NativeBlock
    return replace_classes(model, {Mixer: NativeMixer})


def int8_layers(model: nn.Module) -> list[str]:
    """Names of the weights that `--to ort --precision int8` multiplies in int8, those of each NativeBlock."""
    blocks = [(name, module) for name, module in model.named_modules() if isinstance(module, NativeBlock)]
    parts = chain.from_iterable(block.named_modules(prefix=name) for name, block in blocks)
    return [f"{name}.weight" for name, part in parts if type(part) is nn.Linear]


def _symbolic(op: str, inputs: tuple[Tensor | None, ...], shape: Sequence[int], **attrs: Any) -> Tensor:
    attrs |= dict(interface=INTERFACE, version=__version__)
    options = dict(dtype=torch.float32, shape=shape, version=OPSET_VERSION)
    return torch.onnx.ops.symbolic(f"{DOMAIN}::{op}", inputs, attrs, **options)


def _block(*flat: Any) -> tuple[Tensor, ...]:
    block = unflatten(BlockArguments, flat)
    options = dict(rule=block.rule, reverse=list(block.reverse), eps=block.eps, mlp_eps=block.mlp_eps)
    given = named_tensors(block)
    inputs = {name: given[name] for name in BLOCK_WEIGHTS}
    sizes = [torch.scalar_tensor(size, dtype=torch.int64) for size in block.conv_grid[:3]]  # rows, columns, height
    inputs["conv_grid"] = torch.stack(sizes) if sizes else None
    y = _symbolic("Block", tuple(inputs.values()), block.x.shape, **options)
    return y, *(block.x.new_empty(0) for _ in range(5))


def _scan(*flat: Any) -> tuple[Tensor, ...]:
    scan = unflatten(ScanArguments, flat)
    options = dict(rule=scan.rule, reverse=list(scan.reverse), mean=int(scan.reduce == "mean"))
    if scan.initial_state is not None or scan.return_state:
        raise NotImplementedError("files for onnxruntime with --to ort have no operator of a scan with a carried state")
    y = _symbolic("Scan", tuple(tensors(scan)[:-1]), scan.output_shape, **options)
    return y, scan.x.new_empty(0), scan.x.new_empty(0)


def _norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:  # the default of the operator
    return _symbolic("Norm", (x, weight), x.shape, eps=eps)


def use_int8(graph: Any) -> None:
    """Makes each Block of an `onnx_ir.Graph` a BlockInt8: linear layers in int8, with a scale for each row."""
    import onnx_ir

    tape = onnx_ir.tape.Tape(graph)
    for node in [node for node in graph if (node.domain, node.op_type) == (DOMAIN, "Block")]:
        inputs, scales = dict(zip_longest(BLOCK_INPUTS, node.inputs)), []
        for name in ("in_proj", "out_proj", "mlp_in_proj", "mlp_out_proj"):
            if (weight := inputs[name]) is None:
                scales.append(None)
                continue
            number, scale = quantize(torch.from_numpy(weight.const_value.numpy()))
            inputs[name] = tape.initializer(onnx_ir.tensor(number.numpy()), f"{weight.name}.int8")
            scales.append(tape.initializer(onnx_ir.tensor(scale.squeeze(-1).numpy()), f"{weight.name}.scale"))
            node.replace_input_with(BLOCK_INPUTS.index(name), None)
            if not weight.uses():
                graph.initializers.pop(weight.name)
        new = onnx_ir.Node(DOMAIN, "BlockInt8", [*inputs.values(), *scales], node.attributes.values(), num_outputs=1)
        onnx_ir.convenience.replace_nodes_and_values(graph, node, [node], [new], node.outputs, new.outputs)


# For `ExportedProgram.run_decompositions`: writes operators for onnxruntime.
_OPS = torch.ops.vilonghorn
SYMBOLS = {_OPS.block.default: _block, _OPS.scan.default: _scan, _OPS.rms_norm.default: _norm}
