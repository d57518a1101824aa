"""Decides whether a block runs as the native operator `vilonghorn::block`, and calls it.

It runs where it is faster than its parts. `can_run_now`: eager, float32 tokens on an x86-64 CPU with the native
library. `is_unmodified`: the block is as `Block` made it. `weights_fit`: float32, no bias, no dropout. Every other
block is composed of its modules.
"""

import platform
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from timm.layers import DropPath
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from ..ops._torch import functorch_transform, has_global_hooks, in_forward_mode, num_dispatch_modes
from ..ops.arguments import BlockArguments
from ..ops.backends import cpu, has_rule
from ..ops.block import runs_bf16
from ..ops.register import is_tracing, needs_grad
from ..ops.validate import autocast_dtype, flatten_filter, validate_block
from .norm import RMSNorm, decay_rates

X86 = platform.machine().lower() in ("x86_64", "amd64")
CLASSES = (nn.Parameter, Tensor, FakeTensor)  # of tensors; other subclasses may store something else
INNER_WEIGHTS = ("conv_weight", "conv_bias", "x_proj", "dt_proj", "dt_bias", "A_log", "D")


class Structure(NamedTuple):
    """What a block was made of. It does not hold the block itself, which would then never be freed."""

    kind: type  # of the block
    children: tuple[nn.Module | None, ...]  # of the block
    # Each module below: itself, its class, its children, the names of its parameters.
    parts: list[tuple[nn.Module, type, tuple[nn.Module | None, ...], tuple[str, ...]]]


def describe(block: Any) -> Structure | None:
    """What a new block is made of, for `is_unmodified`; None if the operator never runs it."""
    are_rms_norms = all(type(norm) is RMSNorm for norm in (block.norm, block.norm2) if norm is not None)
    if not (are_rms_norms and block.mixer.scan_norm is None and has_rule(cpu.NAME, block.mixer.rule)):
        return None
    parts = [part for part in block.modules() if part is not block]
    described = [(part, type(part), _children(part), tuple(part._parameters)) for part in parts]
    return Structure(type(block), _children(block), described)


def _children(module: nn.Module) -> tuple[nn.Module | None, ...]:
    return tuple(module.__dict__["_modules"].values())


def is_unchanged(module: nn.Module, kind: type) -> bool:
    """Exact type, no hooks, no overridden forward, not compiled by itself."""
    state = module.__dict__
    return (
        type(module) is kind
        and not state["_forward_hooks"]
        and not state["_forward_pre_hooks"]
        and not state["_backward_hooks"]
        and not state["_backward_pre_hooks"]
        and module._compiled_call_impl is None
        and "forward" not in state
    )


def is_unmodified(block: nn.Module) -> bool:
    """Whether no module of the block was replaced or changed."""
    made: Structure | None = block.__dict__.get("structure")
    if made is None or not is_unchanged(block, made.kind):
        return False
    if _children(block) != made.children or any([_children(part) != children for part, _, children, _ in made.parts]):
        block.structure = None  # type: ignore[assignment]  # frees the parts that were replaced
        return False
    for module, kind, _, names in made.parts:
        if tuple(module.__dict__["_parameters"]) != names or not is_unchanged(module, kind):
            return False
    return True


def block_arguments(block: Any, x: Tensor, grid: list[int] | None, bf16: bool) -> BlockArguments:
    """The block's weights and options as the operator takes them, without drop scales."""
    # Parameters come from their dictionaries: an attribute of a module takes five times as long.
    norm, mixer, mlp = block.norm, block.mixer, block.mlp
    *inner, A_log, D = [mixer._parameters[name] for name in INNER_WEIGHTS]
    inner += [None if A_log is None else decay_rates(A_log), D]
    weights, mlp_eps = [layer._parameters["weight"] for layer in (norm, mixer.in_proj, mixer.out_proj)], 0.0
    mlp_weights: Any = (None, None, None)
    if mlp is not None:
        mlp_weights = [layer._parameters["weight"] for layer in (block.norm2, mlp.fc1, mlp.fc2)]
        mlp_eps = block.norm2.eps
    inner[0], conv_grid = flatten_filter("block", inner[0], grid)
    tensors = (x, *weights[:2], *inner, weights[2], *mlp_weights, None)
    arguments: Any = (*tensors, mixer.rule, mixer.flags, norm.eps, mlp_eps, bf16, conv_grid)
    return BlockArguments(*arguments)


def weights_fit(block: Any, args: BlockArguments) -> bool:
    """Whether the operator computes the block: float32 weights on a CPU, no bias, no dropout in the MLP."""
    mixer, mlp = block.mixer, block.mlp
    if mixer._parameters["scan_norm"] is not None or not has_rule(cpu.NAME, mixer.rule):
        return False
    layers = [mixer.in_proj, mixer.out_proj]
    if mlp is not None:
        layers += [mlp.fc1, mlp.fc2]
        if mlp.drop1.p or mlp.drop2.p or mlp.gate_last:
            return False
    for layer in layers:
        if layer._parameters["bias"] is not None:
            return False
    for weight in args[1:14]:
        if weight is not None and not is_float32_on_cpu(weight):
            return False
    return True


def checked_arguments(block: Any, x: Tensor, grid: list[int] | None, bf16: bool) -> BlockArguments | None:
    """`block_arguments` of a block that the operator computes, else None."""
    if not is_unmodified(block):
        return None
    args = block_arguments(block, x, grid, bf16)
    return args if weights_fit(block, args) else None


def is_float32_on_cpu(t: Tensor) -> bool:
    """Whether the operator takes a tensor: float32, on the CPU, of torch's own class."""
    return t.dtype is torch.float32 and t.is_cpu and type(t) in CLASSES


def _is_in_memory(t: Tensor | None) -> bool:
    """Whether the numbers of a tensor are where `data_ptr` says, for a call without the dispatcher."""
    return t is None or type(t) is nn.Parameter or not (t.is_neg() or t._is_zerotensor() or type(t) is FakeTensor)


def has_fast_block() -> bool:
    """Whether the operator runs here and is faster than its parts. On other processors torch's products are faster."""
    return X86 and cpu.unavailable("cpu") is None


def can_run_now(x: Tensor) -> bool:
    """Whether the operator takes the tokens x, and nothing needs to see the parts of a block."""
    if is_tracing(x) or has_global_hooks() or not has_fast_block() or not is_float32_on_cpu(x) or not x.numel():
        return False
    dtype = autocast_dtype(x)
    return dtype is None or dtype == torch.bfloat16 and cpu.has_bf16_products()


def run_one(block: Any, x: Tensor, grid: list[int] | None) -> Tensor | None:
    """A block by the operator; None where that does not run."""
    args = checked_arguments(block, x, grid, runs_bf16(x)) if can_run_now(x) else None
    if args is None:
        return None
    if _drops(block):
        args = args._replace(drop_scales=_drop_scales(block, x))
    return cpu.run_block(args)


def run_all(blocks: Iterable[Any], x: Tensor, grid: list[int] | None) -> Tensor | None:
    """Blocks one after the other in one native call, without gradients; None where that does not run.

    Returning to Python between blocks costs time (cold caches). Modes of torch that see operators, such as a counter of
    FLOPs, see none here, so this does not run under them.
    """
    if not can_run_now(x) or needs_grad([x]) or num_dispatch_modes() or functorch_transform() or in_forward_mode():
        return None
    bf16, arguments = runs_bf16(x), []
    for block in blocks:
        args = checked_arguments(block, x, grid, bf16)
        if args is None or _drops(block) or needs_grad(args[:14]) or not all([_is_in_memory(t) for t in args[:14]]):
            return None
        validate_block(args)
        arguments.append(args)
    return cpu.blocks_forward(arguments) if arguments else None


def _drops(block: Any) -> bool:
    return isinstance(block.drop_path, DropPath) and block.drop_path.training


def _drop_scales(block: Any, x: Tensor) -> Tensor:
    """Factors of the samples' branches, (branches, B), drawn as timm's DropPath draws them."""
    branches = 1 if block.mlp is None else 2
    return torch.stack([block.drop_path(x.new_ones(len(x))) for _ in range(branches)])
