"""Registers FLOP formulas of our operators for `torch.utils.flop_counter.FlopCounterMode`.

As in torch's own formulas, a multiplication and an addition count one each; here an exponential does too. Work per
element (activations, gates, norms) counts nothing. A backward that recomputes part of forward counts that again. Half
of a forward's count is what papers on vision models call (G)FLOPs: multiply-adds. A formula gets the arguments of its
operator; one of a backward also gets `wanted`.
"""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import register_flop_formula

from . import block, conv, mamba_inner, norm, scan  # noqa: F401  (they define the operators)
from .arguments import (
    LAYOUTS,
    BlockArguments,
    ConvArguments,
    MambaInnerArguments,
    NormArguments,
    ScanArguments,
    unflatten,
)
from .rules import NO_RULE, RULES

SKIP = 2  # D x, added; per token and channel


def _recurrence(a: Any) -> int:
    G, B, L, D, N, *_ = a.sizes
    return G * B * L * D * (RULES[a.rule].flops * N + SKIP)


def _convolution(a: Any) -> int:
    G, B, L, D, _, K, *_ = a.sizes
    return 2 * G * B * L * D * K


def _inner_parts(a: Any) -> tuple[int, int, int]:
    """Convolution; projections to dt, k and q; recurrence."""
    if a.rule == NO_RULE:
        return _convolution(a), 0, 0
    G, B, L, D, N, _, R, H = a.sizes
    return _convolution(a), 2 * G * B * L * (D * (R + 2 * N) + H * R), _recurrence(a)


def _inner_backward(a: Any) -> int:
    convolution, projections, recurrence = _inner_parts(a)
    return 3 * convolution + 2 * projections + 3 * recurrence


def _linear_layers(a: Any) -> dict[str, int]:
    """FLOPs of a block's linear layers, by the names of their weights."""
    weights = {"in_proj": a.in_proj, "out_proj": a.out_proj}
    if a.mlp is not None:
        weights |= {"mlp_in_proj": a.mlp.in_proj, "mlp_out_proj": a.mlp.out_proj}
    return {name: 2 * a.sizes.B * a.sizes.L * weight.numel() for name, weight in weights.items()}


def _block(a: Any) -> int:
    return sum((*_linear_layers(a).values(), *_inner_parts(a)))


def _block_backward(a: Any, wanted: Sequence[int]) -> int:
    # Each gradient of a weight costs as much as the product itself.
    needs = dict(zip(LAYOUTS[BlockArguments].tensors, wanted))
    return sum(flops * (1 + needs[name]) for name, flops in _linear_layers(a).items()) + _inner_backward(a)


def _register(name: str, arguments: type[NamedTuple], forward: Callable, backward: Callable) -> None:
    num_given = len(LAYOUTS[arguments].types)

    def count(*given: Any, **_: Any) -> int:
        return forward(unflatten(arguments, given))

    def count_backward(*given: Any, **_: Any) -> int:  # dy and saved tensors, the arguments, `wanted`
        return backward(unflatten(arguments, islice(given, len(given) - num_given - 1, None)), given[-1])

    register_flop_formula(getattr(torch.ops.vilonghorn, name), get_raw=True)(count)
    register_flop_formula(getattr(torch.ops.vilonghorn, f"{name}_backward"), get_raw=True)(count_backward)


# Backward of a scan runs it again and takes two gradients of each product; that of a convolution does the same.
_register("scan", ScanArguments, _recurrence, lambda a, _: 3 * _recurrence(a))
_register("conv_silu", ConvArguments, _convolution, lambda a, _: 3 * _convolution(a))
for _name in ("mamba_inner_cpu", "mamba_inner_cuda"):
    _register(_name, MambaInnerArguments, lambda a: sum(_inner_parts(a)), lambda a, _: _inner_backward(a))
_register("block", BlockArguments, _block, _block_backward)
_register("rms_norm_cpu", NormArguments, lambda a: 0, lambda a, _: 0)
