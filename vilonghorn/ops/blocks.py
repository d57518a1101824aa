"""`blocks`: blocks with their MLPs, one after the other, as one operator: inference on a CPU with the native library.

After the products of a block, the code and data of Python are no longer in the caches. One operator for all blocks
prepares every call before the first product, and keeps two streams of tokens and the xz of one block.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .backends import cpu
from .register import needs_grad, refuse_forward_mode
from .validate import (
    BlockArguments,
    autocast_dtype,
    check_flags,
    validate_block,
    with_grid,
)

NAME = "vilonghorn::blocks"
NUM_WEIGHTS = 13  # of a block: 10 of `block`, 3 of `gated_mlp`


class BlockForm(NamedTuple):
    """A block for `blocks`."""

    weights: tuple[Tensor | None, ...]  # of `block`, from norm_weight to out_proj
    mlp_weights: tuple[Tensor | None, ...]  # of `gated_mlp`, from norm_weight to out_proj, or three times None
    rule: str
    reverse: Sequence[bool]
    eps: float
    mlp_eps: float


def blocks(x: Tensor, forms: Sequence[BlockForm], *, grid: Sequence[int] | None = None) -> Tensor:
    """Returns x after all blocks, as `vilonghorn.ops.block` and `vilonghorn.ops.gated_mlp` in turn. It has no gradient.

    Args:
        x: tokens, (B, L, dim), float32 on the CPU like all tensors here.
        forms: the blocks, at least one.
        grid: as in `vilonghorn.ops.block`.

    Returns:
        (B, L, dim).

    Raises:
        ValueError: as `block` and `gated_mlp`; no block, or weights of a block that are not complete.
        TypeError: as `block` and `gated_mlp`.
        RuntimeError: the native library is not built, or a gradient is wanted.
    """
    for i, form in enumerate(forms):
        given = len(form.weights), len(form.mlp_weights), len(form.reverse)
        expected = NUM_WEIGHTS - 3, 3, len(form.weights[2]) if len(form.weights) > 2 else 1  # type: ignore[arg-type]
        if given != expected or form.mlp_weights.count(None) not in (0, 3):
            raise ValueError(
                f"blocks: block {i} has {given[0]} weights, {given[1]} of its MLP and {given[2]} flags in reverse, "
                f"expected {expected[0]}, {expected[1]} and {expected[2]}; without an MLP its weights are None"
            )
    weights = [w if w is None else w.resolve_neg() for form in forms for w in (*form.weights, *form.mlp_weights)]
    if needs_grad([x, *weights]):
        raise RuntimeError(f"{NAME} has no gradient; use torch.no_grad(), or call the blocks one by one")
    refuse_forward_mode(NAME, x)
    reverse = [flag for form in forms for flag in check_flags("block", form.reverse)]
    eps = [float(value) for form in forms for value in (form.eps, form.mlp_eps)]
    rules = [form.rule for form in forms]
    sizes = [] if grid is None else [int(size) for size in grid]
    return torch.ops.vilonghorn.blocks(x, weights, rules, reverse, eps, autocast_dtype(x) == torch.bfloat16, sizes)


def split(
    x: Tensor,
    weights: Sequence[Tensor | None],
    rules: Sequence[str],
    reverse: Sequence[int],
    eps: Sequence[float],
    bf16: bool,
    grid: Sequence[int],
) -> list[BlockArguments]:
    """Splits the arguments of the operator into those of `block` and `gated_mlp` for each block, all with the tokens x.

    Raises:
        ValueError: no block, or another number of weights or epsilons than the blocks have.
    """
    if not rules or len(weights) != NUM_WEIGHTS * len(rules) or len(eps) != 2 * len(rules):
        raise ValueError(
            f"blocks: {len(weights)} weights and {len(eps)} epsilons for {len(rules)} blocks, expected at least one "
            f"block, and {NUM_WEIGHTS} weights and 2 epsilons for each"
        )
    pairs, first_flag = [], 0
    for i, rule in enumerate(rules):
        own: Any = weights[i * NUM_WEIGHTS : (i + 1) * NUM_WEIGHTS]
        norm, in_proj, conv, *inner, mlp_norm, mlp_in, mlp_out = own
        filters, grid_options = with_grid("block", conv, grid or None)
        flags = reverse[first_flag : first_flag + len(filters)]
        first_flag += len(filters)
        form: Any = (mlp_norm, mlp_in, mlp_out, None, rule, flags, eps[2 * i], eps[2 * i + 1], bf16, grid_options)
        pairs.append(BlockArguments(x, norm, in_proj, filters, *inner, *form))
    return pairs


def _validated(x: Tensor, *others: Any) -> list[BlockArguments]:
    pairs = split(x.contiguous(), *others)
    for args in pairs:
        validate_block(args)
    return pairs


def _forward(*args: Any) -> Tensor:
    return cpu.blocks_forward(_validated(*args))


def _fake(x: Tensor, *others: Any) -> Tensor:
    _validated(x, *others)
    return x.new_empty(x.shape)


torch.library.define(
    NAME,
    "(Tensor x, Tensor?[] weights, str[] rules, SymInt[] reverse, float[] eps, bool bf16, SymInt[] grid) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.impl(NAME, "default", _forward)
torch.library.register_fake(NAME, _fake)
