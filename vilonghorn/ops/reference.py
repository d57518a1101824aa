"""The reference backend: the recurrence in plain torch, for any device and rule, one pass over time in Python.

Forward saves the state of every CHUNK-th token. Backward recomputes a chunk from its state and differentiates it.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._torch import autograd_in_kernel
from .arguments import ScanArguments
from .rules import RULES, read
from .scan_order import flip_reversed

NAME = "reference"
CHUNK = 16  # steps between two saved states: backward holds at most this many states at once
LANES = 1  # channels of a saved state are padded to a multiple of this


def unavailable(device_type: str, dtype: torch.dtype = torch.float32) -> str | None:
    """None: the reference runs wherever torch does."""
    return None


class Tokens(NamedTuple):
    """What the recurrence reads, in the compute dtype; L counts in each direction's own time."""

    x: Tensor  # (L, G, B, 1, D)
    gate: Tensor  # (L, G, B, 1, D)
    k: Tensor  # (L, G, B, N, 1)
    q: Tensor  # (L, G, B, N, 1)
    A: Tensor | None  # (G, 1, N, D)

    def initial_state(self) -> Tensor:
        """Zeros, (G, B, N, D)."""
        return self.x.new_zeros(*self.x.shape[1:3], self.k.shape[3], self.x.shape[4])

    def chunks(self) -> Iterator["Tokens"]:
        """CHUNK tokens at a time."""
        for start in range(0, len(self.x), CHUNK):
            yield Tokens(*(t[start : start + CHUNK] for t in self[:4]), self.A)


def prepare(args: ScanArguments) -> Tokens:
    """The inputs of the recurrence, token by token."""
    x, dt, k, q = (_to_time(t, args) for t in args[:4])
    if args.dt_bias is not None:
        dt = dt + args.dt_bias.to(dt.dtype)[:, None, None]
    A = None if args.A is None else args.A.to(x.dtype).mT.contiguous().unsqueeze(1)
    return Tokens(x, RULES[args.rule].gate(dt, k), k.mT, q.mT, A)


def finish(y: Tensor, args: ScanArguments) -> Tensor:
    """The scan's result, given what was read at each token, (L, G, B, 1, D): skip, mean and gate by z."""
    y = _flip(y.squeeze(-2).movedim(0, 2), args)
    if args.D is not None:
        y = y + args.D.to(y.dtype)[:, None, None] * args.x.to(y.dtype)
    if args.reduce == "mean":
        y = y.mean(0)
    return (y if args.z is None else y * F.silu(args.z.to(y.dtype))).to(args.x.dtype)


def run_tokens(rule: str, state: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """The state after the tokens, and what was read at each, (tokens, G, B, 1, D)."""
    step, outputs = RULES[rule].step, []
    for x, gate, k, q in zip(*(t.unbind(0) for t in tokens[:4])):  # x[t] in a loop would be slow to differentiate
        state = step(state, x, gate, k, tokens.A)
        outputs.append(read(state, q))
    return state, torch.stack(outputs)


def saved_state_dtype(args: ScanArguments) -> torch.dtype:
    """Dtype of the saved states."""
    return args.compute_dtype


def forward(args: ScanArguments, save: bool) -> tuple[Tensor, Tensor]:
    """Runs a scan; see `Backend`. The saved states are (ceil(L / CHUNK), G, B, N, D) in one dimension."""
    tokens = prepare(args)
    state, outputs, saved = tokens.initial_state(), [tokens.x[:0]], []
    for chunk in tokens.chunks():
        saved.append(state)
        state, y = run_tokens(args.rule, state, chunk)
        outputs.append(y)
    states = torch.stack(saved).flatten() if save and saved else state.new_empty(0)
    return finish(torch.cat(outputs), args).contiguous(), states


def backward(dy: Tensor, args: ScanArguments, saved_states: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of a scan; see `Backend`."""
    with autograd_in_kernel(), torch.enable_grad():
        args = ScanArguments(*(_leaf(t) if isinstance(t, Tensor) else t for t in args))
        inputs = [t for t in args[:8] if t is not None]
        tokens = prepare(args)
        chunks = [Tokens(*map(_leaf, chunk)) for chunk in tokens.chunks()]
        states = saved_states.view(len(chunks), *tokens.initial_state().shape)
        with torch.no_grad():
            y = [run_tokens(args.rule, state, chunk)[1] for state, chunk in zip(states, chunks)]
        y = _leaf(torch.cat([tokens.x[:0], *y]))
        dy_read, *direct = _grad([finish(y, args)], [y, *inputs], [dy])

        dstate = tokens.initial_state()
        dchunks: list[list[Tensor]] = []
        for state, chunk, dy_chunk in reversed(list(zip(states, chunks, dy_read.split(CHUNK)))):
            state, given = _leaf(state), [t for t in chunk if t is not None]
            dstate, *dchunk = _grad(run_tokens(args.rule, state, chunk), [state, *given], [dstate, dy_chunk])
            dchunks.insert(0, dchunk)
        dtokens = [torch.cat(parts) for parts in zip(*(dchunk[:4] for dchunk in dchunks))]
        dtokens += [sum(parts) for parts in zip(*(dchunk[4:] for dchunk in dchunks))]  # of A
        through = _grad([t for t in tokens if t is not None], inputs, dtokens) if dchunks else direct
    grads = iter([(a + b).contiguous() for a, b in zip(through, direct)])
    return tuple(None if t is None else next(grads) for t in args[:8])


def _leaf(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.detach().requires_grad_()


def _grad(outputs: Sequence[Tensor], inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(outputs, inputs, grads, allow_unused=True, materialize_grads=True)


def _to_time(t: Tensor, args: ScanArguments) -> Tensor:
    """(G, B, L, C) as (L, G, B, 1, C) in the compute dtype, reverse directions flipped along L."""
    return _flip(t.to(args.compute_dtype), args).movedim(2, 0).unsqueeze(-2)


def _flip(t: Tensor, args: ScanArguments) -> Tensor:
    return torch.stack(flip_reversed(t, args.reverse)) if any(args.reverse) else t
