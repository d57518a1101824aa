"""The update rules of the scan: one record each, which every part of the library in Python reads.

A rule says how a token changes the state (`step`) and how dt becomes the size of that change (`gate`). The reference
backend runs any rule and differentiates `step` by autograd. The kernels of the backends that a rule lists have both
written again, in C++, CUDA and Triton: CONTRIBUTING.md names the places.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_EXPONENT = 80.0  # exp(80) is finite in float32, and a gate of exp(-80) is zero for every purpose
NO_RULE = "none"  # of a mixer: no recurrence, the convolution's output is gated


class Rule(NamedTuple):
    """An update rule. State, gates and keys are broadcast: (..., N, D), rows (..., 1, D) and columns (..., N, 1)."""

    name: str
    gate: Callable[[Tensor, Tensor], Tensor]  # from dt with its bias, (..., D), and k, (..., N), to (..., D)
    step: Callable[..., Tensor]  # (state, x, gate, k, A) to the next state; linear and symmetric in the state for x = 0
    flops: int  # a token, channel and state: the step and the read by q, as `vilonghorn.ops.flops` counts
    has_decay: bool = False  # whether it has decay rates A, (..., N, D)
    takes_heads: bool = True  # whether mixers with `num_heads` take it
    couples_states: bool = False  # whether a step mixes the N numbers of a channel's state
    number: int = -1  # in kernels/include/vilonghorn.h
    backends: tuple[str, ...] = ()  # with a kernel for it, besides "reference"


RULES: dict[str, Rule] = {}


def register_rule(rule: Rule) -> Rule:
    """Adds a rule under its name, for `scan`, `Mixer` and models.

    Raises:
        ValueError: the name is taken.
    """
    if rule.name in RULES or rule.name == NO_RULE:
        raise ValueError(f"there is a rule {rule.name!r} already; give another name")
    RULES[rule.name] = rule
    return rule


def find_rule(operator: str, name: str) -> Rule:
    """The rule of a name; `operator` is for the error, a ValueError."""
    if name not in RULES:
        raise ValueError(f"{operator}: rule is {name!r}, expected one of {', '.join(map(repr, RULES))}")
    return RULES[name]


def kernel_state_dtype(dtype: torch.dtype, rule: str) -> torch.dtype:
    """Dtype in which kernels on GPUs save states beside activations of a dtype."""
    # bfloat16 halves the memory. The exact rule takes small differences of a state, which it would lose.
    return torch.bfloat16 if dtype == torch.bfloat16 and not RULES[rule].couples_states else torch.float32


def read(state: Tensor, q: Tensor) -> Tensor:
    """The product of a state (..., N, D) and a query (..., N, 1), summed over N: (..., 1, D)."""
    return (q * state).sum(-2, keepdim=True)  # a matrix product might run in TF32


def _longhorn_gate(dt: Tensor, k: Tensor) -> Tensor:
    """For both Longhorn rules: beta / (1 + beta |k|^2) with beta = sigmoid(dt), written so that nothing cancels."""
    return 1 / (1 + k.square().sum(-1, keepdim=True) + torch.exp((-dt).clamp(max=MAX_EXPONENT)))


def _longhorn_step(state: Tensor, x: Tensor | float, gate: Tensor, k: Tensor, A: Tensor | None) -> Tensor:
    return state + gate * k * (x - k * state)


def _longhorn_exact_step(state: Tensor, x: Tensor | float, gate: Tensor, k: Tensor, A: Tensor | None) -> Tensor:
    return state + gate * (x - read(state, k)) * k


def inverse_softplus(step: Tensor) -> Tensor:
    """The dt whose gate of rule "mamba" is `step`, positive."""
    return step + torch.log(-torch.expm1(-step))


def _mamba_gate(dt: Tensor, k: Tensor) -> Tensor:
    return F.softplus(dt)


def _mamba_step(state: Tensor, x: Tensor | float, gate: Tensor, k: Tensor, A: Tensor) -> Tensor:
    return torch.exp(gate * A) * state + gate * x * k


_KERNELS = ("cpu", "cuda", "triton")
# FLOPs: eps k^2; 1 - it; times s; eps x k; their sum; times q, summed
register_rule(Rule("longhorn", _longhorn_gate, _longhorn_step, flops=7, number=0, backends=_KERNELS))
# FLOPs: s k, summed; u k; their sum; times q, summed
register_rule(
    Rule("longhorn_exact", _longhorn_gate, _longhorn_exact_step, 6, couples_states=True, number=1, backends=_KERNELS)
)
# FLOPs: delta A; its exponential; times s; delta x B; their sum; times C, summed
register_rule(
    Rule("mamba", _mamba_gate, _mamba_step, flops=7, has_decay=True, takes_heads=False, number=2, backends=_KERNELS)
)
