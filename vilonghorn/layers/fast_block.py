"""Runs a residual block as one native operator where that is faster; `block` says what is computed.

That is on an x86-64 CPU with the native library. What decides it is checked once, and kept as a plan of the block: its
modules, weights and options, and without gradients the packed call of the library. The plan holds while nothing of this
changes. Without a plan everything is checked at each call. A block that is not as `Block` makes it runs its modules.
"""

import copy
import platform
import struct
from typing import Any

import torch
from timm.layers import DropPath, GluMlp
from torch import Tensor, nn

from ..ops._torch import autocast_dtype, has_global_hooks, is_tracing, is_unchanged, sees_no_operators
from ..ops.arguments import BlockArguments, MlpWeights, named_tensors, tensors
from ..ops.backends import cpu, has_rule
from ..ops.backends.bindings import BLOCK
from ..ops.block import run_block
from ..ops.validate import flatten_weights, validate_block
from .mixer import Mixer
from .norm import RMSNorm, decay_rates
from .short_linear import CLASSES

X86 = platform.machine().lower() in ("x86_64", "amd64")  # on other processors torch's products are faster


@torch.jit.unused
def run(block: Any, x: Tensor, grid: list[int] | None) -> Tensor | None:
    """The result of a `Block`, or None where its modules have to be called."""
    if not can_run_now(x):
        return None
    bf16 = autocast_dtype(x) is not None
    if not sees_no_operators((x,)):
        return run_checked(block, x, grid, bf16)
    sides = () if grid is None else tuple(grid)
    key = x.shape, sides, bf16, torch.get_num_threads(), torch.get_float32_matmul_precision()
    plan = block.__dict__.get("plan")
    if plan is None or plan.key != key or not plan.holds(block):
        block.__dict__["plan"] = plan = None  # frees what it holds
        if (plan := make_plan(block, x, sides, bf16, key)) is None:
            return run_checked(block, x, grid, bf16)
        block.__dict__["plan"] = plan
    if torch.is_grad_enabled() or isinstance(block.drop_path, DropPath) and block.drop_path.training:
        return run_operator(block, plan.arguments(block, x), checked=True)
    return plan.run(block, x)


def can_run_now(x: Tensor) -> bool:
    """Whether the operator runs here and takes the tokens x, and nothing needs to see the parts of a block."""
    if is_tracing(x) or has_global_hooks() or not X86 or cpu.unavailable("cpu") is not None:
        return False
    if x.dtype is not torch.float32 or not x.is_cpu or type(x) not in CLASSES or not x.numel():
        return False
    dtype = autocast_dtype(x)
    return dtype is None or dtype == torch.bfloat16 and cpu.has_bf16_products()


def is_float32_on_cpu(t: Tensor) -> bool:
    """Whether the operator takes a tensor: float32, on the CPU, of torch's own class."""
    return t.dtype is torch.float32 and t.is_cpu and type(t) in CLASSES


def is_swiglu(mlp: Any) -> bool:
    """Whether a module is the MLP of `Block`, apart from its two layers."""
    if not is_unchanged(mlp, GluMlp) or mlp.gate_last:
        return False
    parts = [(mlp.act, nn.SiLU), (mlp.norm, nn.Identity), (mlp.drop1, nn.Dropout), (mlp.drop2, nn.Dropout)]
    return all([is_unchanged(part, kind) for part, kind in parts]) and not mlp.drop1.p and not mlp.drop2.p


def is_one_operator(block: Any) -> bool:
    """Whether the operator computes what the modules of a block compute.

    Hooks of the block itself do not matter: they run before and after its forward.
    """
    mixer, mlp, drop_path = block.mixer, block.mlp, block.drop_path
    kinds: list[tuple[nn.Module, type]] = [(mixer, Mixer), (block.norm, RMSNorm)]
    kinds.append((drop_path, DropPath if isinstance(drop_path, DropPath) else nn.Identity))
    if mlp is not None:
        kinds.append((block.norm2, RMSNorm))
    if not all([is_unchanged(module, kind) for module, kind in kinds]):
        return False
    layers = [mixer.in_proj, mixer.out_proj]
    if mlp is not None:
        if not is_swiglu(mlp):
            return False
        layers += [mlp.fc1, mlp.fc2]
    if not all([is_unchanged(layer, nn.Linear) and layer.bias is None for layer in layers]):
        return False
    return mixer.scan_norm is None and has_rule(cpu.NAME, mixer.rule)


def block_arguments(block: Any, x: Tensor, grid: list[int] | None, bf16: bool) -> BlockArguments:
    """The weights and options of a block as the operator takes them, without drop scales."""
    mixer, mlp = block.mixer, None
    if block.mlp is not None:
        mlp = MlpWeights(block.norm2.weight, block.mlp.fc1.weight, block.mlp.fc2.weight)
    weights, conv_grid = flatten_weights("block", mixer.weights(), grid)
    given = (x, block.norm.weight, mixer.in_proj.weight, weights, mixer.out_proj.weight, mlp, None)
    mlp_eps = 0.0 if mlp is None else block.norm2.eps
    return BlockArguments(*given, mixer.rule, mixer.flags, block.norm.eps, mlp_eps, bf16, conv_grid)


def run_checked(block: Any, x: Tensor, grid: list[int] | None, bf16: bool) -> Tensor | None:
    """The result of the operator for a block without a plan; None if it does not compute that block."""
    args = block_arguments(block, x, grid, bf16) if is_one_operator(block) else None
    if args is None or not all([t is None or is_float32_on_cpu(t) for t in tensors(args)]):
        return None
    return run_operator(block, args)


def run_operator(block: Any, args: BlockArguments, checked: bool = False) -> Tensor:
    """The result of the operator, which has gradients, with stochastic depth; `checked` as in `register_op`."""
    if isinstance(block.drop_path, DropPath) and block.drop_path.training:
        branches, ones = 1 if args.mlp is None else 2, args.x.new_ones(len(args.x))
        scales = torch.stack([block.drop_path(ones) for _ in range(branches)])  # as timm's DropPath draws them
        args = args._replace(drop_scales=scales)
    return run_block(args, checked)


class Plan:
    """What a block that the operator computes is made of, and the packed call of the library without gradients.

    The block keeps it in its dictionary. A copy of the block has none. Several threads may run one.
    """

    X, A, OUT = (BLOCK.offset(name) for name in ("x", "A", "out"))

    def __init__(self, block: Any, args: BlockArguments, packed: bytes, key: tuple) -> None:
        mixer, mlp = block.mixer, block.mlp
        self.args = args._replace(x=args.x.new_empty(0))  # a plan holds no tokens
        self.packed, self.key = packed, key  # what the packed call depends on besides the block
        self.children = [*block._modules.values()]
        modules = [module for child in self.children if child is not None for module in child.modules()]
        self.modules = [(module, type(module), [*module._modules.values()]) for module in modules]
        self.weights = []
        for part in modules:
            for name, t in part._parameters.items():
                memory = None if t is None else (t.data_ptr(), t.dtype, t.shape, t.is_contiguous(), t.is_neg())
                self.weights.append((part, name, t, memory))
        options = [(block.norm, "eps"), (mixer, "rule"), (mixer, "flags")]
        if mlp is not None:
            options += [(block.norm2, "eps"), (mlp, "gate_last"), (mlp.drop1, "p"), (mlp.drop2, "p")]
        self.options = [(module, name, copy.copy(module.__dict__[name])) for module, name in options]

    def __reduce__(self) -> tuple:  # copied and saved as None
        return type(None), ()

    def holds(self, block: Any) -> bool:
        """Whether the block is as it was when the plan was made."""
        if [*block.__dict__["_modules"].values()] != self.children:
            return False
        for module, kind, children in self.modules:
            if not is_unchanged(module, kind) or [*module.__dict__["_modules"].values()] != children:
                return False
        for module, name, t, memory in self.weights:
            if module.__dict__["_parameters"].get(name) is not t:  # an attribute of a module takes longer
                return False
            if memory is not None and memory != (t.data_ptr(), t.dtype, t.shape, t.is_contiguous(), t.is_neg()):
                return False
        for module, name, value in self.options:
            if module.__dict__.get(name) != value:
                return False
        return True

    def arguments(self, block: Any, x: Tensor) -> BlockArguments:
        """`block_arguments` of the block."""
        weights, mixer = self.args.weights, block.mixer
        if self.args.conv_grid:
            weights = weights._replace(conv_weight=mixer.conv_weight.flatten(2))
        if weights.A is not None:
            weights = weights._replace(A=decay_rates(mixer.A_log))
        return self.args._replace(x=x, weights=weights)

    def run(self, block: Any, x: Tensor) -> Tensor:
        """The result of the block without gradients and stochastic depth."""
        packed, x, A_log = bytearray(self.packed), x.contiguous(), block.mixer.A_log
        out = torch.empty_like(x)
        A = None if A_log is None else decay_rates(A_log)
        for offset, t in ((self.X, x), (self.A, A), (self.OUT, out)):
            if t is not None:
                struct.pack_into("P", packed, offset, t.data_ptr())
        cpu.infer_block(packed)
        return out


def make_plan(block: Any, x: Tensor, sides: tuple, bf16: bool, key: tuple) -> Plan | None:
    """A plan of a block; None if the operator does not compute it, or the library cannot read its weights in place."""
    if not is_one_operator(block) or not all(type(side) is int for side in sides):
        return None
    args = block_arguments(block, x, [*sides] or None, bf16)
    given = named_tensors(args) | {"conv_weight": block.mixer.conv_weight}
    weights = {name: t for name, t in given.items() if t is not None and name != "x"}
    in_memory = [t.is_contiguous() and not t.is_neg() and not t._is_zerotensor() for t in weights.values()]
    if not all(in_memory) or not all(map(is_float32_on_cpu, weights.values())):
        return None
    validate_block(args)
    plan = Plan(block, args, cpu.pack_block(args)[0], key)
    own = {id(t) for _, _, t, _ in plan.weights}  # another weight could change unseen
    return plan if all(id(t) in own for name, t in weights.items() if name != "A") else None
