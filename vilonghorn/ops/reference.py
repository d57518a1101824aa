"""The reference backend: the recurrence in plain torch, for any device and rule, one pass over time in Python.

Backward runs the scan again, keeps the state before every STATE_EVERY-th token, and differentiates one chunk of tokens
after the other.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ._torch import autograd_in_kernel
from .arguments import ScanArguments, tensors
from .rules import RULES, read
from .scan_order import flip_reversed

NAME = "reference"
STATE_EVERY = 16  # tokens: backward holds at most this many states at once


def unavailable(device: str | torch.device, dtype: torch.dtype = torch.float32) -> str | None:
    """None: the reference runs wherever torch does."""
    return None


class Tokens(NamedTuple):
    """What the recurrence reads, in the compute dtype; L counts in each direction's own time."""

    x: Tensor  # (L, G, B, 1, D)
    gate: Tensor  # (L, G, B, 1, D)
    k: Tensor  # (L, G, B, N, 1)
    q: Tensor  # (L, G, B, N, 1)
    A: Tensor | None  # (G, 1, N, D)


def prepare(args: ScanArguments) -> tuple[Tokens, Tensor]:
    """The inputs of the recurrence, token by token, and the state before them, (G, B, N, D)."""
    # (G, B, L, C) as (L, G, B, 1, C) in the compute dtype, reverse directions flipped along L
    given = (args.x, args.dt, args.k, args.q)
    x, dt, k, q = (_flip(t.to(args.compute_dtype), args).movedim(2, 0).unsqueeze(-2) for t in given)
    if args.dt_bias is not None:
        dt = dt + args.dt_bias.to(dt.dtype)[:, None, None]
    A = None if args.A is None else args.A.to(x.dtype).transpose(1, 2).contiguous().unsqueeze(1)
    tokens = Tokens(x, RULES[args.rule].gate(dt, k), k.transpose(-1, -2), q.transpose(-1, -2), A)
    if args.initial_state is not None:
        return tokens, args.initial_state.to(x.dtype)
    (_, G, B, _, D), N = x.shape, k.shape[-1]
    return tokens, x.new_zeros(G, B, N, D)


def finish(state: Tensor, y: Tensor, args: ScanArguments) -> tuple[Tensor, Tensor]:
    """The scan's results, given the last state and what was read at each token, (L, G, B, 1, D): skip, mean, gate."""
    y = _flip(y.squeeze(-2).movedim(0, 2), args)
    if args.D is not None:
        y = y + args.D.to(y.dtype)[:, None, None] * args.x.to(y.dtype)
    if args.reduce == "mean":
        y = y.mean(0)
    y = y if args.z is None else y * F.silu(args.z.to(y.dtype))
    return y.to(args.x.dtype), state if args.return_state else state.new_empty(0)


def empty_states(args: ScanArguments, save: bool) -> Tensor:
    """Nothing is saved; see `Backend`."""
    return args.x.new_empty(0)


def forward(args: ScanArguments, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Runs a scan; see `Backend`."""
    y, state = _run(args)
    return y.contiguous(), state.contiguous(), empty_states(args, save)


def backward(dy: Tensor, dstate: Tensor | None, args: ScanArguments, saved_states: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of a scan; see `Backend`."""
    with autograd_in_kernel(), torch.enable_grad():
        args = ScanArguments(*(t.detach().requires_grad_() if isinstance(t, Tensor) else t for t in args))
        inputs = [t for t in tensors(args) if t is not None]
        y, state = _run(args)
        outputs, grads_of = ([y, state], [dy, dstate]) if dstate is not None else ([y], [dy])
        given = torch.autograd.grad(outputs, inputs, grads_of, allow_unused=True, materialize_grads=True)
    grads = iter(given)
    return tuple(None if t is None else next(grads).contiguous() for t in tensors(args))


def _run(args: ScanArguments) -> tuple[Tensor, Tensor]:
    tokens, state = prepare(args)
    outputs = [tokens.x[:0]]
    for start in range(0, len(tokens.x), STATE_EVERY):
        chunk = Tokens(*(t[start : start + STATE_EVERY] for t in (tokens.x, tokens.gate, tokens.k, tokens.q)), tokens.A)
        state, y = checkpoint(run_tokens, args.rule, state, *chunk, use_reentrant=False, preserve_rng_state=False)
        outputs.append(y)
    return finish(state, torch.cat(outputs), args)


def run_tokens(rule: str, state: Tensor, *chunk: Any) -> tuple[Tensor, Tensor]:
    """The state after the tokens, and what was read at each, (tokens, G, B, 1, D)."""
    tokens, step, outputs = Tokens(*chunk), RULES[rule].step, []
    each = (t.unbind(0) for t in (tokens.x, tokens.gate, tokens.k, tokens.q))  # x[t] is slow to differentiate
    for x, gate, k, q in zip(*each):
        state = step(state, x, gate, k, tokens.A)
        outputs.append(read(state, q))
    return state, torch.stack(outputs)


def _flip(t: Tensor, args: ScanArguments) -> Tensor:
    return torch.stack(flip_reversed(t, args.reverse)) if any(args.reverse) else t
