"""Decides whether a block runs as the native operator `vilonghorn::block`, and calls it.

It runs where it is faster than its parts. `can_run_now`: eager, float32 tokens on an x86-64 CPU with the native
library. `unmodified`: the block is as `Block` made it. `checked_arguments`: no bias, no dropout. `fits`: float32
weights. Every other block is composed of its modules.
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
IN_MEMORY = (nn.Parameter, type(None))  # of weights that are read without torch's dispatcher
NO_MLP = (None, None, None)
INNER_WEIGHTS = ("conv_weight", "conv_bias", "x_proj", "dt_proj", "dt_bias", "A_log", "D")


class Structure(NamedTuple):
    """What a block was made of. It does not hold the block itself, which would then never be freed."""

    kind: type  # of the block
    children: list[nn.Module | None]  # of the block
    # Each module below: itself, its class, its children, the names of its parameters.
    parts: list[tuple[nn.Module, type, list[nn.Module | None], list[str]]]
    weights: list[tuple[nn.Module, str]]  # of `_weights`
    absent: list[tuple[nn.Module, str]]  # parameters that are None where the operator runs


def describe(block: Any) -> Structure | None:
    """What a new block is made of, for `unmodified`; None if the operator never runs it."""
    are_rms_norms = all(type(norm) is RMSNorm for norm in (block.norm, block.norm2) if norm is not None)
    if not (are_rms_norms and block.mixer.scan_norm is None and has_rule(cpu.NAME, block.mixer.rule)):
        return None
    modules = [part for part in block.modules() if part is not block]
    parts = [(m, type(m), [*m._modules.values()], [*m._parameters]) for m in modules]
    mixer, mlp = block.mixer, block.mlp
    layers = [mixer.in_proj, mixer.out_proj] + ([] if mlp is None else [mlp.fc1, mlp.fc2])
    absent = [(layer, "bias") for layer in layers] + [(mixer, "scan_norm")]
    return Structure(type(block), [*block._modules.values()], parts, _weights(block), absent)


def _weights(block: Any) -> list[tuple[nn.Module, str]]:
    """The block's weights in the operator's order, each as a module and a name for `_parameters`."""
    norm, mixer, mlp = block.norm, block.mixer, block.mlp
    weights = [(norm, "weight"), (mixer.in_proj, "weight"), *((mixer, name) for name in INNER_WEIGHTS)]
    layers = [mixer.out_proj] + ([] if mlp is None else [block.norm2, mlp.fc1, mlp.fc2])
    return weights + [(layer, "weight") for layer in layers]


def _parameters(places: list[tuple[nn.Module, str]]) -> list[Tensor | None]:
    """Parameters from their dictionaries: an attribute of a module takes five times as long."""
    return [module.__dict__["_parameters"][name] for module, name in places]


def is_unchanged(module: nn.Module, kind: type) -> bool:
    """Exact type, no hooks, no overridden forward, not compiled by itself."""
    state = module.__dict__
    return (
        type(module) is kind
        and not state["_forward_hooks"]
        and not state["_forward_pre_hooks"]
        and not state["_backward_hooks"]
        and not state["_backward_pre_hooks"]
        and state.get("_compiled_call_impl") is None
        and "forward" not in state
    )


def unmodified(block: nn.Module) -> Structure | None:
    """The block's structure, or None if one of its modules was replaced or changed."""
    made: Structure | None = block.__dict__.get("structure")
    if made is None or not is_unchanged(block, made.kind):
        return None
    replaced = [*block.__dict__["_modules"].values()] != made.children
    for module, kind, children, names in made.parts:
        state = module.__dict__  # is not kept: torch.export replaces it
        replaced = replaced or [*state["_modules"].values()] != children
        if not is_unchanged(module, kind) or [*state["_parameters"]] != names:
            made = None
    if replaced:
        block.structure = made = None  # type: ignore[assignment]  # frees the parts that were replaced
    return made


def block_arguments(
    block: Any, x: Tensor, grid: list[int] | None, bf16: bool, weights: list[Tensor | None] | None = None
) -> BlockArguments:
    """The block's weights and options as the operator takes them, without drop scales."""
    weights = weights or _parameters(_weights(block))
    norm_weight, in_proj, conv_weight, conv_bias, x_proj, dt_proj, dt_bias, A_log, D, out_proj, *mlp = weights
    filters, conv_grid = flatten_filter("block", conv_weight, grid)  # type: ignore[arg-type]
    A = None if A_log is None else decay_rates(A_log)
    inner = (filters, conv_bias, x_proj, dt_proj, dt_bias, A, D)
    modules: dict[str, Any] = block.__dict__["_modules"]
    state, mlp_eps = modules["mixer"].__dict__, modules["norm2"].eps if mlp else 0.0
    options = (state["rule"], state["flags"], modules["norm"].eps, mlp_eps, bf16, conv_grid)
    arguments: Any = (x, norm_weight, in_proj, *inner, out_proj, *(mlp or NO_MLP), None, *options)
    return BlockArguments(*arguments)


def checked_arguments(block: Any, x: Tensor, grid: list[int] | None, bf16: bool) -> BlockArguments | None:
    """`block_arguments` of an unmodified block without biases and dropout in the MLP, else None."""
    made = unmodified(block)
    if made is None or any([t is not None for t in _parameters(made.absent)]):
        return None
    if (mlp := block.__dict__["_modules"].get("mlp")) is not None and (mlp.drop1.p or mlp.drop2.p or mlp.gate_last):
        return None
    args = block_arguments(block, x, grid, bf16, _parameters(made.weights))
    return args if has_rule(cpu.NAME, args.rule) else None


def fits(args: BlockArguments) -> bool:
    """Whether the operator takes the weights."""
    return all([t is None or is_float32_on_cpu(t) for t in args[1:14]])


def is_float32_on_cpu(t: Tensor) -> bool:
    """Whether the operator takes a tensor: float32, on the CPU, of torch's own class."""
    return t.dtype is torch.float32 and t.is_cpu and type(t) in CLASSES


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
    if args is None or not fits(args):
        return None
    if _drops(block):
        branches = 1 if block.mlp is None else 2
        scales = [block.drop_path(x.new_ones(len(x))) for _ in range(branches)]  # as timm's DropPath draws them
        args = args._replace(drop_scales=torch.stack(scales))
    return cpu.run_block(args)


def run_all(blocks: Iterable[Any], x: Tensor, grid: list[int] | None) -> Tensor | None:
    """Blocks one after the other in one native call, without gradients; None where that does not run.

    Returning to Python between blocks costs time (cold caches). Modes of torch that see operators, such as a counter of
    FLOPs, see none here, so this does not run under them. Nor does it run for tensors whose numbers are not in their
    memory: a lazily negated one, a fake one.
    """
    if not can_run_now(x) or needs_grad([x]) or num_dispatch_modes() or functorch_transform() or in_forward_mode():
        return None
    if type(x) is FakeTensor or x.is_neg() or x._is_zerotensor():
        return None
    bf16, arguments, sizes = runs_bf16(x), [], []
    for block in blocks:
        args = checked_arguments(block, x, grid, bf16)
        if args is None or _drops(block) or needs_grad(args[:14]):
            return None
        if any([type(weight) not in IN_MEMORY for weight in _parameters(block.structure.weights)]):
            return None
        known = validate_block.recall(args)
        if known is None and not fits(args):
            return None
        arguments.append(args)
        sizes.append(known or validate_block(args))
    return cpu.blocks_forward(arguments, sizes) if arguments else None


def _drops(block: Any) -> bool:
    drop_path = block.__dict__["_modules"]["drop_path"]
    return isinstance(drop_path, DropPath) and drop_path.training
