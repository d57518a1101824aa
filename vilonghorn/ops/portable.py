"""The scan in operators that every runtime knows, while timm's switch for export (`set_exportable`) is on.

The other operators then are their own plain forms.
A captured graph keeps the recurrence as one loop over tokens of any number (torch's `scan`, an ONNX Scan). Channels are
the last dimension of the state, so that each step of the loop is made of long rows and of products with k and q.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan as captured_loop

from .reference import finish, prepare
from .validate import ScanArguments, autocast_dtype, check

Step = Callable[[Tensor, tuple[Tensor, ...]], tuple[Tensor, Tensor]]


def scan_portable(args: ScanArguments) -> Tensor:
    """`vilonghorn.ops.scan` of these arguments, without the library's operators.

    Differentiable, unless `torch.export` captures it: an exported graph is for inference.

    Raises:
        ValueError, TypeError: as `vilonghorn.ops.scan`.
    """
    check(args)
    if autocast_dtype(args.x) is not None:  # the loop's products are sums of states, which stay in float32
        with torch.autocast(args.x.device.type, enabled=False):
            return scan_portable(args)
    if torch.compiler.is_exporting():  # the exporters cannot take apart a captured loop that has gradients
        args = ScanArguments(*(t.detach() if isinstance(t, Tensor) else t for t in args))
    u, gate, k, q, A, D = prepare(args)
    x, gate, k, q = (t.movedim(2, 0).unsqueeze(-2) for t in (gate * u, gate, k, q))  # (L, G, B, 1, D or N)
    state = u.new_zeros(*u.shape[:2], args.k.shape[-1], u.shape[-1])  # (G, B, N, D)
    if args.rule == "longhorn":
        step, inputs = _longhorn, (x, gate, k.mT, k.mT.square(), q)
    elif args.rule == "longhorn_exact":
        step, inputs = _longhorn_exact, (x, gate, k.mT, k, q)
    else:
        step, inputs = _mamba(A.mT.contiguous().unsqueeze(1)), (x, gate, k.mT, q)
    y = _loop(step, state, inputs).squeeze(-2).movedim(0, 2)
    return finish(args, y if D is None else y + D * u).to(args.x.dtype)


def _longhorn(state: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """One token: gate times x, gate, k, its squares and q to the next state and its answer, (G, B, 1, D)."""
    x, gate, k, squared, q = inputs
    state = state - state * (gate * squared) + x * k
    return state, q @ state


def _longhorn_exact(state: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    x, gate, k, k_row, q = inputs
    state = state + k * (x - gate * (k_row @ state))
    return state, q @ state


def _mamba(A: Tensor) -> Step:
    def step(state: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        x, gate, k, q = inputs
        state = torch.exp(gate * A) * state + x * k
        return state, q @ state

    return step


def _loop(step: Step, state: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
    """The step's second results, stacked, over the first dimension of its inputs."""
    if torch.compiler.is_compiling():
        return captured_loop(step, state, inputs, dim=0)[1]
    outputs = []
    for present in zip(*(t.unbind(0) for t in inputs)):
        state, output = step(state, present)
        outputs.append(output)
    return torch.stack(outputs) if outputs else inputs[0]
