"""`scan`, the operator: the recurrence of every rule, in one or more directions.

The backends compute it, and `backends.choose` picks one. Autograd, `torch.compile` and `torch.export` see one operator,
`torch.ops.vilonghorn.scan`, whichever runs it.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ._torch import autocast_dtype
from .arguments import CHANNELS_FIRST, ScanArguments, by_channel, named_tensors
from .backends import choose, expand_heads, native
from .register import register_op
from .validate import check_flags, validate_scan


def scan(
    x: Tensor,
    dt: Tensor,
    k: Tensor,
    q: Tensor,
    *,
    z: Tensor | None = None,
    A: Tensor | None = None,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    rule: str = "longhorn",
    reverse: Sequence[bool] = (False,),
    reduce: str = "none",
    channels_first: bool = False,
    backend: str | None = None,
) -> Tensor | Any:
    """Runs a selective state-space recurrence over L tokens, for G directions at once.

    For each direction, sequence and channel i, with a state s of N numbers that starts at `initial_state`:

    - "longhorn": eps = beta_i / (1 + beta_i |k|^2), beta_i = sigmoid(dt_i + dt_bias_i);
      s <- (1 - eps k^2) s + eps x_i k  (diagonal form of Longhorn, Liu et al., arXiv 2407.14207)
    - "longhorn_exact": s <- s + eps (x_i - s.k) k  (the closed form before its diagonal approximation)
    - "mamba": delta = softplus(dt_i + dt_bias_i); s <- exp(delta A_i) s + delta x_i k  (S6, arXiv 2312.00752: k is its
      B, q its C)

    and y_i = s.q + D_i x_i, times silu(z_i). States, gates and sums are float32 (float64 for float64 inputs).

    Args:
        x: values, (G, B, L, D), float32, bfloat16, float16 or float64, any strides; fastest if D is contiguous, or L
            with `channels_first`.
        dt: steps before their bias and gate, (G, B, L, D), of x's dtype like k, q and z. Or (G, B, L, H) for H heads,
            which divide D: the D / H channels of a head share dt.
        k: keys, (G, B, L, N), N from 1 to 64 (16 is specialised).
        q: queries, (G, B, L, N).
        z: gate shared by the directions, (B, L, D). Default: no gate.
        A: decay rates, negative, (G, D, N); for rule "mamba" only, which needs it.
        D: skip weights, (G, D). Default: no skip.
        dt_bias: bias of dt, (G, D) or (G, H). Default: none.
        initial_state: the states before the first token that each direction reads, (G, B, N, D). Default: zeros.
        return_state: also return the states after the last token that each direction reads (default: False). A
            sequence may be cut anywhere: with the state of one piece as `initial_state` of the next, the pieces give
            what the whole gives.
        rule: "longhorn" (default), "longhorn_exact" or "mamba".
        reverse: a flag for each direction: True scans from the last token to the first.
        reduce: "none" (default) keeps the directions apart, "mean" averages them before the gate.
        channels_first: whether y and the gradients of x, dt and z lie in memory as (B, G, D, L), or (B, D, L), as x, dt
            and z should (default: False). The CPU library reads and writes them as they are, other backends copy. Not
            with reduce="mean", nor with z for more than one direction.
        backend: a name of `vilonghorn.ops.backends()` to insist on; default: the first that can run on x's device.

    Returns:
        y, of x's dtype: (G, B, L, D), or (B, L, D) with reduce="mean". With `return_state`, y and the states,
        (G, B, N, D), float32 (float64 for float64 inputs).

    Raises:
        ValueError: unknown rule, reduction or backend; shapes, devices or A that do not fit.
        TypeError: dtypes that do not fit, or flags other than True and False.
        RuntimeError: the backend asked for cannot run here.
    """
    for name, t in (("x", x), ("dt", dt), ("k", k), ("q", q)):
        if not isinstance(t, Tensor):
            raise TypeError(f"scan: {name} is {t!r}, expected a tensor")
    flags, dtype = check_flags("scan", reverse), autocast_dtype(x)
    if dtype is not None:
        # Activations share the autocast dtype. A, D and dt_bias keep theirs: gates and states are float32 anyway.
        x, dt, k, q = x.to(dtype), dt.to(dtype), k.to(dtype), q.to(dtype)
        z = None if z is None else z.to(dtype)
    options = (rule, flags, reduce, backend, bool(return_state), bool(channels_first))
    args = ScanArguments(x, dt, k, q, z, A, D, dt_bias, initial_state, *options)
    if args.has_heads:
        validate_scan(args)
        args = expand_heads(args)
    y, state = _run(args)
    if not args.return_state:
        return y
    if not x.shape[2]:  # no token: the operator runs nothing
        zeros = x.new_zeros(state.shape, dtype=state.dtype)
        state = zeros if initial_state is None else initial_state.to(state.dtype) + zeros
    return y, state


def _forward(args: ScanArguments, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    backend = choose(args)
    if not args.channels_first or backend.NAME == native.NAME:
        return backend.forward(args, save)
    y, state, saved_states = backend.forward(args._replace(channels_first=False), save)
    return by_channel(y).copy_(y), state, saved_states


def _backward(
    dy: Tensor, dstate: Tensor | None, saved: Sequence[Tensor], args: ScanArguments, wanted: Sequence[int]
) -> Sequence[Tensor | None]:
    backend, dstate = choose(args), dstate if args.return_state else None
    if not args.channels_first or backend.NAME == native.NAME:
        return backend.backward(dy, dstate, args, *saved)
    grads = backend.backward(dy, dstate, args._replace(channels_first=False), *saved)
    pairs = zip(named_tensors(args), grads)
    return [by_channel(g).copy_(g) if g is not None and name in CHANNELS_FIRST else g for name, g in pairs]


_run = register_op(
    "scan",
    ScanArguments,
    validate_scan,
    num_results=2,
    num_saved=1,
    forward=_forward,
    fake=lambda args, save: (*args.new_outputs(), choose(args).empty_states(args, save)),
    backward=_backward,
)
