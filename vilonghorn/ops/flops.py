"""Formulas for `torch.utils.flop_counter.FlopCounterMode`, which without them counts our operators as nothing.

As torch does for its own, a multiplication and an addition count one each, and so here does an exponential; what is done
once for an element, such as activations, gates and norms, counts nothing. A backward that makes again what forward did
not keep counts that too. Half of a forward's figure is what papers on vision models call its (G)FLOPs: multiply-adds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch.utils.flop_counter import register_flop_formula

from . import block, conv, norm, token_decay  # noqa: F401  (they define the operators)
from . import mamba_inner as mix
from . import scan as operator
from .validate import BlockArguments

# For one token, channel and number of state: decay, update and read (see `vilonghorn.ops.scan`).
STEP = {
    "longhorn": 7,  # eps k^2; 1 - it; times s; eps x k; their sum; times q, summed
    "longhorn_exact": 6,  # s k, summed; u k; their sum; times q, summed
    "mamba": 7,  # delta A; its exponential; times s; delta x B; their sum; times C, summed
}
SKIP = 2  # D x, added, for one token and channel


def _count(operator: Callable) -> Callable:
    """Registers a formula of the operator's arguments, by name, tensors as their shapes."""

    def register(formula: Callable[[SimpleNamespace], int]) -> Callable[[SimpleNamespace], int]:
        names = [argument.name for argument in operator.default._schema.arguments]

        @register_flop_formula(operator)
        def count(*args, out_shape=None, **kwargs) -> int:
            return formula(SimpleNamespace(**dict(zip(names, args)), **kwargs))

        return formula

    return register


def _recurrence(rule: str, directions: int, batch: int, length: int, channels: int, states: int) -> int:
    return directions * batch * length * channels * (STEP[rule] * states + SKIP)


@_count(torch.ops.vilonghorn.scan)
def scan_flops(a: SimpleNamespace) -> int:
    """The recurrence, in all directions."""
    return _recurrence(a.rule, *a.x, a.k[-1])


@_count(torch.ops.vilonghorn.scan_backward)
def scan_backward_flops(a: SimpleNamespace) -> int:
    """The states again, and for every product of the recurrence one for each of its factors."""
    return 3 * scan_flops(a)


@_count(torch.ops.vilonghorn.scan_token_decay)
def token_decay_flops(a: SimpleNamespace) -> int:
    """As rule "mamba", without a skip."""
    G, B, L, D = a.x
    return G * B * L * D * STEP["mamba"] * a.k[-1]


@_count(torch.ops.vilonghorn.scan_token_decay_backward)
def token_decay_backward_flops(a: SimpleNamespace) -> int:
    """As that of the scan."""
    return 3 * token_decay_flops(a)


@_count(torch.ops.vilonghorn.conv_silu)
def conv_flops(a: SimpleNamespace) -> int:
    """A product and a sum for each tap."""
    (B, L, D), (G, _, K) = a.x, a.weight
    return 2 * G * B * L * D * K


@_count(torch.ops.vilonghorn.conv_silu_backward)
def conv_backward_flops(a: SimpleNamespace) -> int:
    """The convolution again, for SiLU, and its two gradients."""
    return 3 * conv_flops(a)


def _mix_parts(a: SimpleNamespace) -> tuple[int, int, int, int]:
    """Of a mixer's forward: convolution, projections to steps, keys and queries, recurrence, output projection."""
    (B, L, _), (G, D, K), (_, P, _), R = a.xz, a.conv_weight, a.x_proj, a.dt_proj[-1]
    recurrence = _recurrence(a.rule, G, B, L, D, (P - R) // 2)
    out = 0 if a.out_proj is None else 2 * B * L * D * a.out_proj[0]
    return 2 * G * B * L * D * K, 2 * G * B * L * D * (P + R), recurrence, out


@_count(torch.ops.vilonghorn.mix)
def mix_flops(a: SimpleNamespace) -> int:
    """All that a mixer does after its input projection."""
    return sum(_mix_parts(a))


@_count(torch.ops.vilonghorn.mix_backward)
def mix_backward_flops(a: SimpleNamespace) -> int:
    """Convolution, steps and recurrence again; then two products for each."""
    conv, projections, recurrence, out = _mix_parts(a)
    return 3 * conv + 2 * projections + 3 * recurrence + 2 * out


@_count(torch.ops.vilonghorn.block)
def block_flops(a: SimpleNamespace) -> int:
    """All that a residual block does."""
    return 2 * math.prod(a.x) * a.in_proj[0] + mix_flops(_mixer(a))


@_count(torch.ops.vilonghorn.block_backward)
def block_backward_flops(a: SimpleNamespace) -> int:
    """As that of its parts."""
    in_proj, out_proj = 2 * math.prod(a.x) * a.in_proj[0], 2 * math.prod(a.xz) // 2 * a.out_proj[0]
    wanted = dict(zip(BlockArguments._fields, a.wanted))
    return mix_backward_flops(_mixer(a)) + in_proj + in_proj * wanted["in_proj"] - out_proj * (1 - wanted["out_proj"])


def _mixer(a: SimpleNamespace) -> SimpleNamespace:
    """What a block's mixer gets of the block's arguments."""
    return SimpleNamespace(**{**vars(a), "xz": (*a.x[:2], a.in_proj[0])})


@_count(torch.ops.vilonghorn.matmul)
def matmul_flops(a: SimpleNamespace) -> int:
    """What torch counts for its own product."""
    return 2 * math.prod(a.a) * a.b[1]


@_count(torch.ops.vilonghorn.rms_norm)
@_count(torch.ops.vilonghorn.rms_norm_backward)
def norm_flops(a: SimpleNamespace) -> int:
    """Nothing, as torch counts norms."""
    return 0
