"""Decides whether a block runs as the native operator `vilonghorn::block`, and calls it.

It runs where it is faster than its parts: eager, on float32 tokens on a CPU, for a block that is as `Block` made it.
Every other block is composed of its modules.
"""

from collections.abc import Iterable
from typing import Any

import torch
from timm.layers import DropPath
from torch import Tensor, nn

from ..ops._torch import functorch_transform, has_global_hooks, num_dispatch_modes
from ..ops.backends import cpu, has_rule
from ..ops.block import is_float32_on_cpu, prefers_block, run_block, runs_bf16
from ..ops.register import is_tracing, needs_grad
from ..ops.validate import BlockArguments, flatten_filter, validate_block
from .norm import RMSNorm

# Of each module of a block: itself (None for the block, which would never be freed), its class, its children.
Structure = list[tuple[nn.Module | None, type, tuple[nn.Module | None, ...]]]


def describe(block: Any) -> Structure:
    """What a block consists of, for `is_as_made`; an empty list if the operator never runs it."""
    norms = [norm for norm in (block.norm, block.norm2) if norm is not None]
    fits = all(type(norm) is RMSNorm for norm in norms) and block.mixer.scan_norm is None
    if not (fits and has_rule(cpu.NAME, block.mixer.rule)):
        return []
    modules = ((None if module is block else module, module) for module in block.modules())
    return [(kept, type(module), tuple(module._modules.values())) for kept, module in modules]


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


def is_as_made(block: Any) -> bool:
    """Whether no module of the block was replaced or changed."""
    for module, kind, children in block.structure:
        module = block if module is None else module
        if tuple(module.__dict__["_modules"].values()) != children or not is_unchanged(module, kind):
            return False
    return len(block.structure) > 0


def block_arguments(block: Any, x: Tensor, grid: list[int] | None, bf16: bool) -> BlockArguments:
    """The block's weights and options as the operator takes them, without drop scales."""
    norm, mixer, mlp = block.norm, block.mixer, block.mlp
    weights = (norm.weight, mixer.in_proj.weight, *mixer.inner_weights(), mixer.out_proj.weight)
    mlp_weights = (None, None, None) if mlp is None else (block.norm2.weight, mlp.fc1.weight, mlp.fc2.weight)
    mlp_eps = 0.0 if mlp is None else block.norm2.eps
    filters, conv_grid = flatten_filter("block", weights[2], grid)
    tensors = (x, *weights[:2], filters, *weights[3:], *mlp_weights, None)
    return BlockArguments(*tensors, mixer.rule, mixer.flags, norm.eps, mlp_eps, bf16, conv_grid)


def takes(block: Any, args: BlockArguments) -> bool:
    """Whether the operator computes the block: float32 weights on a CPU, no bias, no dropout in the MLP."""
    mixer, mlp = block.mixer, block.mlp
    if mixer.in_proj.bias is not None or mixer.out_proj.bias is not None:
        return False
    if mlp is not None and not (mlp.fc1.bias is None and mlp.fc2.bias is None and mlp.drop1.p == mlp.drop2.p == 0):
        return False
    return all([t is None or is_float32_on_cpu(t) for t in args[1:14]])


def runs_here(x: Tensor) -> bool:
    """Whether the operator takes the tokens x, here and now."""
    return not is_tracing(x) and not has_global_hooks() and prefers_block(x)


def run_one(block: Any, x: Tensor, grid: list[int] | None) -> Tensor | None:
    """A block by the operator; None where that does not run."""
    if not (runs_here(x) and is_as_made(block)):
        return None
    args = block_arguments(block, x, grid, runs_bf16(x))
    if not takes(block, args):
        return None
    if isinstance(block.drop_path, DropPath) and block.drop_path.training:
        args = args._replace(drop_scales=_drop_scales(block, x))
    return run_block(args)


def run_all(blocks: Iterable[Any], x: Tensor, grid: list[int] | None) -> Tensor | None:
    """Blocks one after the other in one native call, without gradients; None where that does not run.

    Returning to Python between blocks costs time (cold caches). Modes of torch that see operators, such as a counter of
    FLOPs, see none here, so this does not run under them.
    """
    if not runs_here(x) or num_dispatch_modes() or functorch_transform() is not None:
        return None
    bf16, arguments = runs_bf16(x), []
    for block in blocks:
        is_dropping = isinstance(getattr(block, "drop_path", None), DropPath) and block.drop_path.training
        if is_dropping or not hasattr(block, "structure") or not is_as_made(block):
            return None
        args = block_arguments(block, x, grid, bf16)
        if needs_grad(args[:14]) or not takes(block, args):
            return None
        validate_block(args)
        arguments.append(args)
    return cpu.blocks_forward(arguments) if arguments else None


def _drop_scales(block: Any, x: Tensor) -> Tensor:
    """Factors of the samples' branches, (branches, B), drawn as timm's DropPath draws them."""
    branches = 1 if block.mlp is None else 2
    return torch.stack([block.drop_path(x.new_ones(len(x))) for _ in range(branches)])
