"""The recurrence in plain torch, stated once: one step, its adjoint, and the loops over tokens.

`scan_reference` is differentiable and can be exported. `forward` and `backward` are a backend for any device; they save
the state of every CHUNK-th token only. All are slow: one pass over time in Python.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from timm.layers import is_exportable
from torch import Tensor

from ._torch import captured_loop
from .scan_order import flip_reversed
from .validate import ScanArguments, autocast_dtype

NAME = "reference"
CHUNK = 16  # steps between two saved states: backward holds at most this many states at once
LANES = 1  # channels of a saved state are padded to a multiple of this
MAX_EXPONENT = 80.0  # exp(80) is finite in float32, and a gate of exp(-80) is zero for every purpose


def unavailable(device_type: str, dtype: torch.dtype = torch.float32) -> str | None:
    """None: the reference runs wherever torch does."""
    return None


def step_size(rule: str, dt: Tensor, k: Tensor) -> Tensor:
    """The gate of a token, given dt with its bias (..., D) and k (..., N): Mamba's delta, or eps of Longhorn."""
    if rule == "mamba":
        return F.softplus(dt)
    # beta / (1 + beta |k|^2) with beta = sigmoid(dt), written so that nothing cancels
    return 1 / (1 + k.square().sum(-1, keepdim=True) + torch.exp((-dt).clamp(max=MAX_EXPONENT)))


def step(rule: str, state: Tensor, x: Tensor | float, gate: Tensor, k: Tensor, A: Tensor | None) -> Tensor:
    """The state (..., N, D) after a token. With x = 0 a step is a linear map of the state, and a symmetric one.

    x and gate are rows (..., 1, D), k is a column (..., N, 1). A, for rule "mamba" only, broadcasts to (..., N, D).
    """
    if rule == "longhorn":
        return state + gate * k * (x - k * state)
    if rule == "longhorn_exact":
        return state + gate * (x - read(state, k)) * k
    return torch.exp(gate * A) * state + gate * x * k


def read(state: Tensor, q: Tensor) -> Tensor:
    """The product of a state (..., N, D) and a query (..., N, 1), summed over N: (..., 1, D)."""
    if is_exportable():
        return q.mT @ state  # one node of a graph
    return (q * state).sum(-2, keepdim=True)  # a product might run in TF32


def step_adjoint(
    rule: str, grad: Tensor, state: Tensor, x: Tensor, gate: Tensor, k: Tensor, A: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of `state`, before a step, and of x, gate, k and A, given `grad`, that of the state after the step."""
    dx = gate * read(grad, k)
    if rule == "mamba":
        dlog = grad * torch.exp(gate * A) * state  # gradient of gate * A
        dgate = x * read(grad, k) + (dlog * A).sum(-2, keepdim=True)
        dk, dA = (grad * gate * x).sum(-1, keepdim=True), dlog * gate
    else:
        exact = rule == "longhorn_exact"
        error = x - (read(state, k) if exact else k * state)
        dgate = read(grad * error, k)
        dk = (grad * gate * error - state * (dx if exact else grad * gate * k)).sum(-1, keepdim=True)
        dA = None
    return step(rule, grad, 0.0, gate, k, A), dx, dgate, dk, dA


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

    def each(self) -> Iterator[tuple[Tensor, ...]]:
        """x, gate, k and q of one token after the other."""
        return zip(*(t.unbind(0) for t in self[:4]))


def prepare(args: ScanArguments) -> Tokens:
    """The inputs of the recurrence, token by token."""
    x, k, q = (_to_time(t, args) for t in (args.x, args.k, args.q))
    A = None if args.A is None else args.A.to(x.dtype).mT.contiguous().unsqueeze(1)
    return Tokens(x, step_size(args.rule, _biased_dt(args), k), k.mT, q.mT, A)


def finish(y: Tensor, args: ScanArguments) -> Tensor:
    """The scan's result, given what was read at each token, (L, G, B, 1, D): skip, mean and gate by z."""
    y = _add_skip(_from_time(y, args), args)
    if args.reduce == "mean":
        y = y.mean(0)
    return (y if args.z is None else y * F.silu(args.z.to(y.dtype))).to(args.x.dtype)


def scan_reference(args: ScanArguments) -> Tensor:
    """Runs `vilonghorn.ops.scan` in torch's own operators, differentiably.

    A captured graph holds one loop over any number of tokens (torch's `scan`, an ONNX Scan). An exported graph has no
    gradients. `args` are validated.
    """
    if autocast_dtype(args.x) is not None:  # states stay in float32
        with torch.autocast(args.x.device.type, enabled=False):
            return scan_reference(args)
    if torch.compiler.is_exporting():  # the exporters cannot decompose a captured loop that has gradients
        args = ScanArguments(*(t.detach() if isinstance(t, Tensor) else t for t in args))
    tokens, rows = prepare(args), torch.compiler.is_compiling() and is_exportable()
    if rows:
        tokens = tokens._replace(q=tokens.q.mT)  # rows of queries save a node in the loop

    def run_token(state: Tensor, token: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        x, gate, k, q = token
        state = step(args.rule, state, x, gate, k, tokens.A)
        return state, q @ state if rows else read(state, q)

    state, outputs = tokens.initial_state(), []
    if torch.compiler.is_compiling():
        changing = tuple(t.clone(memory_format=torch.contiguous_format) for t in tokens[:4])  # export fails for views
        return finish(captured_loop(run_token, state, changing, dim=0)[1], args)
    for token in tokens.each():  # unbound: the backward of x[t] would write zeros of the size of x for each t
        state, y = run_token(state, token)
        outputs.append(y)
    return finish(torch.stack(outputs) if outputs else tokens.x, args)


def saved_state_dtype(args: ScanArguments) -> torch.dtype:
    """Dtype of the saved states."""
    return args.compute_dtype


def forward(args: ScanArguments, save: bool) -> tuple[Tensor, Tensor]:
    """Runs a scan; see `Backend`. The saved states are (ceil(L / CHUNK), G, B, N, D) in one dimension."""
    tokens = prepare(args)
    state, y, saved = tokens.initial_state(), torch.empty_like(tokens.x), []
    for t, (x, gate, k, q) in enumerate(tokens.each()):
        if save and t % CHUNK == 0:
            saved.append(state)
        state = step(args.rule, state, x, gate, k, tokens.A)
        y[t] = read(state, q)
    return finish(y, args).contiguous(), torch.stack(saved).flatten() if saved else y.new_empty(0)


def backward(dy: Tensor, args: ScanArguments, checkpoints: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of a scan; see `Backend`.

    From the last token to the first, the gradient of the state takes up q dy, then goes back through `step_adjoint`.
    States are recomputed from the checkpoints, one chunk at a time.
    """
    tokens = prepare(args)
    checkpoints = checkpoints.view(-(-len(tokens.x) // CHUNK), *tokens.initial_state().shape)
    each = list(tokens.each())
    dz_dy, dy = _gate_adjoint(dy.to(tokens.x.dtype), args)  # dy: (G, B, L, D)
    dread = _to_time(dy, args)
    y, dx, dgate = (torch.empty_like(tokens.x) for _ in range(3))
    dk, dq = torch.empty_like(tokens.k), torch.empty_like(tokens.q)
    dA = None if tokens.A is None else torch.zeros_like(tokens.A)
    grad = tokens.initial_state()
    for start in reversed(range(0, len(each), CHUNK)):
        chunk, states = each[start : start + CHUNK], [checkpoints[start // CHUNK]]
        for x, gate, k, _ in chunk:
            states.append(step(args.rule, states[-1], x, gate, k, tokens.A))
        for i in reversed(range(len(chunk))):
            t, (x, gate, k, q) = start + i, chunk[i]
            y[t] = read(states[i + 1], q)
            dq[t] = (states[i + 1] * dread[t]).sum(-1, keepdim=True)
            grad = grad + q * dread[t]
            grad, dx[t], dgate[t], dk[t], dA_t = step_adjoint(args.rule, grad, states[i], x, gate, k, tokens.A)
            if dA is not None:
                dA += dA_t.sum_to_size(dA.shape)
    ddt = _step_size_adjoint(args, tokens, dgate, dk)
    dx, ddt, dk, dq, y = (_from_time(t, args) for t in (dx, ddt, dk.mT, dq.mT, y))
    dD = None if args.D is None else (dy * args.x.to(dy.dtype)).sum((1, 2))
    dx = dx if args.D is None else dx + args.D.to(dy.dtype)[:, None, None] * dy
    dz = None if dz_dy is None else (dz_dy * _add_skip(y, args)).sum(0)
    dA = None if dA is None else dA.squeeze(1).mT
    grads = (dx, ddt, dk, dq, dz, dA, dD, None if args.dt_bias is None else ddt.sum((1, 2)))
    return tuple(None if v is None else v.to(t.dtype).contiguous() for v, t in zip(grads, args[:8]))


def _to_time(t: Tensor, args: ScanArguments) -> Tensor:
    """(G, B, L, C) as (L, G, B, 1, C) in the compute dtype, reverse directions flipped along L."""
    return _flip(t.to(args.compute_dtype), args).movedim(2, 0).unsqueeze(-2)


def _from_time(t: Tensor, args: ScanArguments) -> Tensor:
    """The inverse of `_to_time`."""
    return _flip(t.squeeze(-2).movedim(0, 2), args)


def _flip(t: Tensor, args: ScanArguments) -> Tensor:
    return torch.stack(flip_reversed(t, args.reverse)) if any(args.reverse) else t


def _biased_dt(args: ScanArguments) -> Tensor:
    dt = _to_time(args.dt, args)
    return dt if args.dt_bias is None else dt + args.dt_bias.to(dt.dtype)[:, None, None]


def _step_size_adjoint(args: ScanArguments, tokens: Tokens, dgate: Tensor, dk: Tensor) -> Tensor:
    """The gradient of dt. Adds to dk, in place, what comes through |k|^2 in the gate."""
    dt, gate = _biased_dt(args), tokens.gate
    if args.rule == "mamba":
        return dgate * torch.sigmoid(dt)
    dk -= 2 * tokens.k * (dgate * gate * gate).sum(-1, keepdim=True)
    return dgate * gate * (gate * torch.exp((-dt).clamp(max=MAX_EXPONENT)))


def _add_skip(y: Tensor, args: ScanArguments) -> Tensor:
    return y if args.D is None else y + args.D.to(y.dtype)[:, None, None] * args.x.to(y.dtype)


def _gate_adjoint(dy: Tensor, args: ScanArguments) -> tuple[Tensor | None, Tensor]:
    """What multiplies the scan's own y in dz, and dy before z and the mean, (G, B, L, D)."""
    if args.reduce == "mean":
        dy = (dy / len(args.reverse)).expand(args.x.shape)
    if args.z is None:
        return None, dy
    z = args.z.to(dy.dtype)
    sigmoid = torch.sigmoid(z)
    return dy * sigmoid * (1 + z * (1 - sigmoid)), dy * z * sigmoid
