"""`blocks`: blocks with their MLPs, one after the other, as one operator: inference on a CPU with the native library.

After the products of a block the code and data of Python are no longer in the caches. One operator for all blocks does
what is to be done in Python before the first, and needs memory for two streams of tokens only.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .backends import cpu
from .validate import (
    BlockArguments,
    MlpArguments,
    autocast_dtype,
    check_flags,
    validate_block,
    validate_gated_mlp,
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
        ValueError: as `block` and `gated_mlp`.
        TypeError: as `block` and `gated_mlp`.
        RuntimeError: the native library is not built, or forward-mode differentiation.
    """
    if forward_ad.unpack_dual(x).primal is not x:
        raise RuntimeError(f"{NAME} has no forward-mode derivative; use reverse mode")
    weights = [weight for form in forms for weight in (*form.weights, *form.mlp_weights)]
    reverse = [flag for form in forms for flag in check_flags("block", form.reverse)]
    eps = [float(value) for form in forms for value in (form.eps, form.mlp_eps)]
    rules = [form.rule for form in forms]
    return torch.ops.vilonghorn.blocks(x, weights, rules, reverse, eps, autocast_dtype(x) == torch.bfloat16, grid or [])


def split(
    x: Tensor,
    weights: Sequence[Tensor | None],
    rules: Sequence[str],
    reverse: Sequence[int],
    eps: Sequence[float],
    bf16: bool,
    grid: Sequence[int],
) -> list[tuple[BlockArguments, MlpArguments | None]]:
    """The arguments of the operator to those of `block` and `gated_mlp`, with the tokens x for all."""
    pairs, first = [], 0
    for i, rule in enumerate(rules):
        own: Any = weights[i * NUM_WEIGHTS : (i + 1) * NUM_WEIGHTS]
        norm, in_proj, conv, *inner, mlp_norm, mlp_in, mlp_out = own
        filters, grid_options = with_grid("block", conv, grid or None)
        flags, first = reverse[first : first + len(filters)], first + len(filters)
        form: Any = (rule, flags, eps[2 * i], True, bf16, grid_options)
        mlp = None if mlp_norm is None else MlpArguments(x, mlp_norm, mlp_in, mlp_out, eps[2 * i + 1], True, bf16)
        pairs.append((BlockArguments(x, norm, in_proj, filters, *inner, *form), mlp))
    return pairs


def _validated(*args) -> list[tuple[BlockArguments, MlpArguments | None]]:
    pairs = split(*args)
    for block, mlp in pairs:
        validate_block(block)
        if mlp is not None:
            validate_gated_mlp(mlp)
    return pairs


def _forward(*args) -> Tensor:
    return cpu.blocks_forward(_validated(*args))


def _fake(*args) -> Tensor:
    (first, _), *_ = _validated(*args)
    return first.x.new_empty(first.x.shape)


torch.library.define(
    NAME,
    "(Tensor x, Tensor?[] weights, str[] rules, SymInt[] reverse, float[] eps, bool bf16, SymInt[] grid) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.impl(NAME, "default", _forward)
torch.library.register_fake(NAME, _fake)
