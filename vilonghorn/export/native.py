"""This library's operators in exported files: where their library is, and how onnxruntime calls them."""

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import __version__
from ..layers import Block, Mixer, RMSNorm, fast_block
from ..layers.exportable import ExportableMixer, replace_classes
from ..models.vilonghornv2 import ConvStem, Downsample, Stage
from ..ops._torch import is_unchanged
from ..ops.arguments import BlockArguments, ScanArguments, named_tensors, tensors
from ..ops.backends import cpu
from ..ops.backends.bindings import BLOCK_WEIGHTS
from .precision import quantize

DOMAIN = "vilonghorn"
OPSET_VERSION = 1
INTERFACE = 5  # kInterface of kernels/ort/node.h, which explains it


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
        return _block_node(fast_block.block_arguments(self, x, grid, False), x)


class NativeStage(Stage):
    """A stage whose operators take and return maps, not tokens."""

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """As `Stage.forward`."""
        x = self.downsample(x)
        for block in self.blocks:
            x = _block_node(fast_block.block_arguments(block, x.flatten(1, 2), list(x.shape[1:3]), False), x)
        return x


class NativeDownsample(Downsample):
    """A downsampling that is one operator in the exported graph."""

    def forward(self, x: Tensor) -> Tensor:
        """As `Downsample.forward`."""
        B, H, W, _ = x.shape
        return _linear(x, self.reduction, (B, H // 2, W // 2), 2, self.norm)


class NativeLinear(nn.Linear):
    """A linear layer that is one operator in the exported graph."""

    def forward(self, x: Tensor) -> Tensor:
        """As `nn.Linear.forward`, for (B, in_features)."""
        return _linear(x, self, x.shape[:1])


class NativeStem(ConvStem):
    """A stem that is one operator in the exported graph, which takes images whose sides are multiples of `step`."""

    step: int

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """As `ConvStem.forward`."""
        (B, _, *sides), conv1, conv2 = x.shape, self.conv1, self.conv2
        for conv in (conv1, conv2):
            sides = [(side - 1) // conv.stride[0] + 1 for side in sides]
        inputs = (x, conv1.weight, conv1.bias, conv2.weight, conv2.bias, self.norm.weight)
        strides = dict(stride1=conv1.stride[0], stride2=conv2.stride[0])
        return _symbolic("Stem", inputs, (B, *sides, conv2.out_channels), eps=self.norm.eps, step=self.step, **strides)


class NativePool(nn.AdaptiveAvgPool2d):
    """The average of each channel, over columns and then rows: onnxruntime takes longer for both at once."""

    def forward(self, x: Tensor) -> Tensor:
        """As `nn.AdaptiveAvgPool2d(1).forward`."""
        return x.mean(-1, keepdim=True).mean(-2, keepdim=True)


class NativeNorm(RMSNorm):
    """A norm that is one operator in the exported graph."""

    def forward(self, x: Tensor) -> Tensor:
        """As `RMSNorm.forward`."""
        return _symbolic("Norm", (x, self.weight), x.shape, eps=self.eps)


def use_operators(model: nn.Module) -> nn.Module:
    """Replaces the classes of layers in a model, in place, and returns it: it can be captured, but not run."""
    for module in model.modules():
        parts = dict(module.named_children())
        if type(module) is Block and fast_block.is_one_operator(module):
            module.__class__ = NativeBlock
        elif type(module) is Downsample and _are_unchanged(parts, norm=RMSNorm, reduction=nn.Linear):
            module.__class__ = NativeDownsample
        elif type(module) is ConvStem and _are_unchanged(parts, norm=RMSNorm, conv1=nn.Conv2d, conv2=nn.Conv2d):
            module.__class__ = NativeStem
            module.step = getattr(model, "model", model).patches()[0][0]
        elif type(module) is nn.AdaptiveAvgPool2d and module.output_size == 1:
            module.__class__ = NativePool
    for module in model.modules():
        if type(module) is Stage and all(is_unchanged(block, NativeBlock) for block in module.blocks):
            module.__class__ = NativeStage
    head = getattr(model, "get_classifier", lambda: None)()
    if head is not None and is_unchanged(head, nn.Linear):
        head.__class__ = NativeLinear
    return replace_classes(model, {Mixer: NativeMixer, RMSNorm: NativeNorm})


def _are_unchanged(parts: dict[str, nn.Module], **kinds: type) -> bool:
    return all(is_unchanged(parts[name], kind) for name, kind in kinds.items())


def int8_layers(model: nn.Module) -> list[str]:
    """Names of the weights that `--to ort --precision int8` multiplies in int8: those of the operators of INT8."""
    layers = []
    for name, module in model.named_modules():
        if isinstance(module, NativeLinear):
            layers.append(name)
        elif isinstance(module, (NativeBlock, NativeDownsample)):
            layers += [part for part, layer in module.named_modules(prefix=name) if type(layer) is nn.Linear]
        elif isinstance(module, NativeStem):
            layers.append(f"{name}.conv2")
    return [f"{layer}.weight" for layer in layers]


def _symbolic(op: str, inputs: tuple[Tensor | None, ...], shape: Sequence[int], **attrs: Any) -> Tensor:
    attrs |= dict(interface=INTERFACE, version=__version__)
    options = dict(dtype=torch.float32, shape=shape, version=OPSET_VERSION)
    return torch.onnx.ops.symbolic(f"{DOMAIN}::{op}", inputs, attrs, **options)


def _block_node(block: BlockArguments, x: Tensor) -> Tensor:
    """The operator of a block on tokens x, or on a map, whose own sides are those of the grid."""
    options = dict(rule=block.rule, reverse=list(block.reverse), eps=block.eps, mlp_eps=block.mlp_eps)
    given: dict[str, Tensor | None] = dict(named_tensors(block), x=x)
    sides = [*block.conv_grid[:3]] if x.dim() == 3 else [0, 0, *block.conv_grid[2:3]]  # rows, columns, height of filter
    sizes = [torch.scalar_tensor(size, dtype=torch.int64) for size in sides]
    conv_grid = torch.stack(sizes) if block.conv_grid else None
    return _symbolic("Block", (*(given[name] for name in BLOCK_WEIGHTS), conv_grid), x.shape, **options)


def _linear(x: Tensor, layer: nn.Module, shape: Sequence[int], merge: int = 1, norm: nn.Module | None = None) -> Tensor:
    inputs = (x, None if norm is None else norm.weight, layer.weight, layer.bias)
    eps = 0.0 if norm is None else norm.eps
    return _symbolic("Linear", inputs, (*shape, layer.out_features), merge=merge, eps=eps)


def _scan(scan: ScanArguments) -> Tensor:
    scan = scan.with_channel_steps() if scan.has_heads else scan
    options = dict(rule=scan.rule, reverse=list(scan.reverse), mean=int(scan.reduce == "mean"))
    return _symbolic("Scan", tuple(tensors(scan)[:-1]), scan.output_shape, **options)  # without an initial state


class NativeMixer(ExportableMixer):
    """A mixer whose scan is one operator in the exported graph."""

    scan_function = staticmethod(_scan)


INT8 = dict(Block=("in_proj", "out_proj", "mlp_in_proj", "mlp_out_proj"), Linear=("weight",), Stem=("weight2",))
INPUTS = dict(
    Block=(*BLOCK_WEIGHTS, "conv_grid"),
    Linear=("x", "norm_weight", "weight", "bias"),
    Stem=("images", "weight1", "bias1", "weight2", "bias2", "norm_weight"),
)


def use_int8(graph: Any) -> None:
    """Makes operators NAME of an `onnx_ir.Graph` NAMEInt8: the weights of INT8 in int8, with a scale for each row."""
    import onnx_ir

    tape = onnx_ir.tape.Tape(graph)
    for node in [node for node in graph if node.domain == DOMAIN and node.op_type in INT8]:
        inputs, scales = dict(zip_longest(INPUTS[node.op_type], node.inputs)), []
        for name in INT8[node.op_type]:
            if (weight := inputs[name]) is None:
                scales.append(None)
                continue
            full = torch.from_numpy(weight.const_value.numpy())
            number, scale = quantize(full, tuple(range(1, full.dim())))
            inputs[name] = tape.initializer(onnx_ir.tensor(number.numpy()), f"{weight.name}.int8")
            scales.append(tape.initializer(onnx_ir.tensor(scale.flatten().numpy()), f"{weight.name}.scale"))
            node.replace_input_with(list(inputs).index(name), None)
            if not weight.uses():
                graph.initializers.pop(weight.name)
        arguments = [DOMAIN, f"{node.op_type}Int8", [*inputs.values(), *scales], node.attributes.values()]
        new = onnx_ir.Node(*arguments, num_outputs=1)
        onnx_ir.convenience.replace_nodes_and_values(graph, node, [node], [new], node.outputs, new.outputs)
