"""What a scan is given: the operator's arguments as one named tuple, and the one place that checks them.

Every backend receives a `ScanArguments` that passed `check`, so that none repeats these tests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active as transformed

RULES = ("longhorn", "longhorn_exact", "mamba")
REDUCTIONS = ("none", "mean")
MAX_STATE = 64
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class ScanArguments(NamedTuple):
    """Arguments of `vilonghorn.ops.scan`, in the operator's order (see there for their meaning)."""

    x: Tensor  # (G, B, L, D)
    dt: Tensor  # (G, B, L, D)
    k: Tensor  # (G, B, L, N)
    q: Tensor  # (G, B, L, N)
    z: Tensor | None  # (B, L, D)
    A: Tensor | None  # (G, D, N), mamba only
    D: Tensor | None  # (G, D)
    dt_bias: Tensor | None  # (G, D)
    rule: str
    reverse: tuple[bool, ...]
    reduce: str

    @property
    def output_shape(self) -> tuple[int, ...]:
        return tuple(self.x.shape[1:] if self.reduce == "mean" else self.x.shape)

    @property
    def compute_dtype(self) -> torch.dtype:
        """Type of gates, state and accumulation: float32, or float64 for float64 inputs."""
        return torch.float64 if self.x.dtype == torch.float64 else torch.float32

    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in self._asdict().items() if isinstance(value, Tensor)}


class MixArguments(NamedTuple):
    """Arguments of `vilonghorn.ops.mamba_inner`, in the operator's order (see there for their meaning)."""

    xz: Tensor  # (B, L, 2D)
    conv_weight: Tensor  # (G, D, K)
    conv_bias: Tensor  # (G, D)
    x_proj: Tensor  # (G, R + 2N, D)
    dt_proj: Tensor  # (G, D, R)
    dt_bias: Tensor  # (G, D)
    A: Tensor | None  # (G, D, N), mamba only
    D: Tensor  # (G, D)
    out_proj: Tensor | None  # (dim, D)
    rule: str
    reverse: tuple[bool, ...]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """B, L, D."""
        B, L, width = self.xz.shape
        return B, L, width // 2


class BlockArguments(NamedTuple):
    """Arguments of `vilonghorn.ops.block`, in the operator's order (see there for their meaning)."""

    x: Tensor  # (B, L, dim)
    norm_weight: Tensor  # (dim,)
    in_proj: Tensor  # (2D, dim)
    conv_weight: Tensor  # (G, D, K)
    conv_bias: Tensor  # (G, D)
    x_proj: Tensor  # (G, R + 2N, D)
    dt_proj: Tensor  # (G, D, R)
    dt_bias: Tensor  # (G, D)
    A: Tensor | None  # (G, D, N), mamba only
    D: Tensor  # (G, D)
    out_proj: Tensor  # (dim, D)
    rule: str
    reverse: Sequence[int]
    eps: float
    residual: bool


def checkpoint_shape(
    groups: int, batch: int, length: int, states: int, channels: int, chunk: int, lanes: int
) -> tuple[int, int, int, int, int]:
    """Of a scan's states before every `chunk`-th step, the channels padded to whole vectors of `lanes`."""
    return groups, batch, (length + chunk - 1) // chunk, states, (channels + lanes - 1) // lanes * lanes


def checkpoint_size(*sizes: int) -> int:
    """Numbers in a tensor of `checkpoint_shape`."""
    return math.prod(checkpoint_shape(*sizes))


def direction_flags(operator: str, reverse: Sequence[bool]) -> list[int]:
    """`reverse` as operators take it: in integers, as torch.jit.trace knows no lists of booleans.

    Raises:
        TypeError: what is not a flag for each direction, each True or False (or 1 or 0).
    """
    if not (isinstance(reverse, (tuple, list)) and all(isinstance(flag, int) and flag in (0, 1) for flag in reverse)):
        raise TypeError(f"{operator}: reverse is {reverse!r}, expected a tuple with True or False for each direction")
    return [int(flag) for flag in reverse]


def saves(tensors: Sequence[Tensor | None]) -> bool:
    """Whether forward keeps what backward starts from. What torch.jit.trace records may be trained, or run without
    gradients, and an inner function transform does not tell what an outer one wants: these always keep it."""
    if torch.jit.is_tracing() or transformed():
        return True
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that activations like x take where autocast is on, else None. Like torch's own, it spares float64."""
    device_type = x.device.type
    if device_type == "meta" or x.dtype == torch.float64:  # torch raises for meta, which has no autocast
        return None
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def check(args: ScanArguments) -> None:
    """Refuses arguments that no backend could run.

    Raises:
        ValueError: an unknown rule or reduction, a shape that does not fit, a missing or superfluous `A`, mixed devices.
        TypeError: a missing tensor, a dtype outside float32, bfloat16, float16 and float64, or activations of mixed dtypes.
    """
    for name, tensor in zip(args._fields, args[:4]):  # the dispatcher lets None through
        if tensor is None:
            raise TypeError(f"scan: {name} is None, expected a tensor")
    if args.rule not in RULES:
        raise ValueError(f"scan: rule is {args.rule!r}, expected one of {', '.join(map(repr, RULES))}")
    if args.reduce not in REDUCTIONS:
        raise ValueError(f"scan: reduce is {args.reduce!r}, expected one of {', '.join(map(repr, REDUCTIONS))}")
    if (args.A is None) == (args.rule == "mamba"):
        needs = "needs A of shape (G, D, N)" if args.rule == "mamba" else "takes no A (only rule 'mamba' does)"
        raise ValueError(f"scan: rule {args.rule!r} {needs}")
    if args.x.dim() != 4:
        raise ValueError(f"scan: x has shape {tuple(args.x.shape)}, expected (G, B, L, D)")
    if args.k.dim() != 4:
        raise ValueError(f"scan: k has shape {tuple(args.k.shape)}, expected (G, B, L, N)")
    G, B, L, D = args.x.shape
    N = args.k.shape[-1]
    if not 1 <= N <= MAX_STATE:
        raise ValueError(f"scan: state size N is {N} (the last dimension of k), expected 1 to {MAX_STATE}")
    if G < 1 or len(args.reverse) != G:
        raise ValueError(
            f"scan: reverse has {len(args.reverse)} flags for {G} directions, expected one for each (G >= 1)"
        )
    expected = ((G, B, L, D), (G, B, L, D), (G, B, L, N), (G, B, L, N), (B, L, D), (G, D, N), (G, D), (G, D))
    device, dtype = args.x.device, args.x.dtype
    for name, tensor, shape in zip(args._fields, args, expected):
        if tensor is None:
            continue
        if tensor.shape != shape:
            raise ValueError(
                f"scan: {name} has shape {tuple(tensor.shape)}, expected {shape} to go with x {(G, B, L, D)} and N = {N}"
            )
        if tensor.device != device:
            raise ValueError(f"scan: {name} is on {tensor.device} but x is on {device}; move them to one device")
        if tensor.dtype not in DTYPES:
            raise TypeError(f"scan: {name} is {tensor.dtype}, expected one of {', '.join(map(str, DTYPES))}")
        if tensor.dtype != dtype and name in ("dt", "k", "q", "z"):
            raise TypeError(f"scan: {name} is {tensor.dtype} but x is {dtype}; x, dt, k, q and z share one dtype")
