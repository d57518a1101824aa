"""Registers FLOP formulas of our operators for `torch.utils.flop_counter.FlopCounterMode`.

As in torch's own formulas, a multiplication and an addition count one each; here an exponential does too. Work per
element (activations, gates, norms) counts nothing. A backward that recomputes part of forward counts that again. Half
of a forward's count is what papers on vision models call (G)FLOPs: multiply-adds.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import register_flop_formula

from . import block, blocks, chunked, conv, mamba_inner, norm, scan  # noqa: F401  (they define the operators)
from .validate import (
    BlockArguments,
    ChunkArguments,
    ConvArguments,
    MambaInnerArguments,
    NormArguments,
    ScanArguments,
)

# Per token, channel and state: decay, update and read (see `vilonghorn.ops.scan`).
STEP = {
    "longhorn": 7,  # eps k^2; 1 - it; times s; eps x k; their sum; times q, summed
    "longhorn_exact": 6,  # s k, summed; u k; their sum; times q, summed
    "mamba": 7,  # delta A; its exponential; times s; delta x B; their sum; times C, summed
}
SKIP = 2  # D x, added; per token and channel


# Formulas take an operator's arguments with tensors as their shapes, and of backward which gradients are wanted.


def _recurrence(rule: str, G: int, B: int, L: int, D: int, N: int) -> int:
    return G * B * L * D * (STEP[rule] * N + SKIP)


def _scan(a: Any) -> int:
    G, B, L, D = a.x
    return _recurrence(a.rule, G, B, L, D, a.k[-1])


def _chunks(a: Any) -> int:
    (G, B, L, D), N, heads, C = a.x, a.k[-1], a.dt[-1], chunked.CHUNK
    # k k^T, q k^T and six products for the inverse; three products with the state and two with the added numbers
    return G * B * L * (heads * (4 * C * N + 12 * C * C) + D * (6 * N + 4 * C + SKIP))


def _conv(a: Any) -> int:
    return 2 * math.prod(a.x) * a.weight[0] * a.weight[2]


def _inner_parts(a: Any) -> tuple[int, int, int]:
    """Convolution; projections to dt, k and q; recurrence."""
    (B, L, _), (G, D, *kernel) = a[0], a.conv_weight
    if a.rule == "none":
        return 2 * G * B * L * D * math.prod(kernel), 0, 0
    (_, P, _), R = a.x_proj, a.dt_proj[-1]
    recurrence = _recurrence(a.rule, G, B, L, D, (P - R) // 2)
    return 2 * G * B * L * D * math.prod(kernel), 2 * G * B * L * D * (P + R), recurrence


def mamba_inner_flops(a: Any, scan_norm: Sequence[int] | None = None) -> int:
    """Floating-point operations of `mamba_inner`, forward.

    Args:
        a: `MambaInnerArguments` with shapes in place of tensors.
        scan_norm: shape of its `scan_norm`: each direction of it scans the one set of parameters.
    """
    convolution, projections, recurrence = _inner_parts(a)
    return convolution + projections + recurrence * (1 if scan_norm is None else scan_norm[0])


def _inner_backward(a: Any) -> int:
    convolution, projections, recurrence = _inner_parts(a)
    return 3 * convolution + 2 * projections + 3 * recurrence


def _projections(a: Any) -> int:
    hidden = 0 if a.mlp_out_proj is None else a.mlp_out_proj[1]
    return 2 * math.prod(a.x) * (a.in_proj[0] + a.out_proj[1] + 3 * hidden)


def _projections_backward(a: Any, wanted: Sequence[int]) -> int:
    needs = dict(zip(a._fields, wanted))  # each gradient of a weight costs as much as the product itself
    products = a.in_proj[0] * (1 + needs["in_proj"]) + a.out_proj[1] * (1 + needs["out_proj"])
    return 2 * math.prod(a.x) * products


def _block(a: Any) -> int:
    return _projections(a) + mamba_inner_flops(a)


def _shapes(arguments: Any) -> Any:
    """The arguments with shapes in place of tensors."""
    return type(arguments)(*(t.shape if isinstance(t, torch.Tensor) else t for t in arguments))


def _register(name: str, arguments: type[NamedTuple], forward: Callable, backward: Callable) -> None:
    last = slice(-1 - len(arguments._fields), -1)  # before them saved tensors, after them `save` or `wanted`
    register_flop_formula(getattr(torch.ops.vilonghorn, name))(lambda *args, **_: forward(arguments(*args[last])))
    register_flop_formula(getattr(torch.ops.vilonghorn, f"{name}_backward"))(
        lambda *args, **_: backward(arguments(*args[last]), args[-1])
    )


# Backward of a scan runs it again and takes two gradients of each product; that of a convolution does the same.
_register("scan", ScanArguments, _scan, lambda a, _: 3 * _scan(a))
_register("scan_chunked_triton", ChunkArguments, _chunks, lambda a, _: 3 * _chunks(a))
_register("conv_silu", ConvArguments, _conv, lambda a, _: 3 * _conv(a))
for _name in ("mamba_inner_cpu", "mamba_inner_cuda"):
    _register(_name, MambaInnerArguments, mamba_inner_flops, lambda a, _: _inner_backward(a))
_register(
    "block",
    BlockArguments,
    _block,
    lambda a, wanted: _projections_backward(a, wanted) + _inner_backward(a),
)
_register("rms_norm_cpu", NormArguments, lambda a: 0, lambda a, _: 0)


@register_flop_formula(torch.ops.vilonghorn.blocks, get_raw=True)
def _blocks(*args: Any, **_: Any) -> int:
    return sum(_block(_shapes(a)) for a in blocks.split(*args))
