"""Arguments of the operators, their sizes, and the checks of both.

Backends and kernels receive validated arguments, and read their sizes from `args.sizes`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

RULES = ("longhorn", "longhorn_exact", "mamba")
REDUCTIONS = ("none", "mean")
MAX_STATE = 64  # N
MAX_CONV = 64  # K
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Sizes(NamedTuple):
    """Sizes of a scan, and of the mixer around it."""

    G: int  # directions
    B: int  # batch
    L: int  # tokens
    D: int  # channels
    N: int  # state size
    K: int = 0  # tokens in the convolution
    R: int = 0  # rank of dt

    def checkpoint_shape(self, chunk: int, lanes: int) -> tuple[int, int, int, int, int]:
        """Shape of the states before every `chunk`-th step, with channels padded to a multiple of `lanes`."""
        return self.G, self.B, (self.L + chunk - 1) // chunk, self.N, (self.D + lanes - 1) // lanes * lanes

    def num_checkpoints(self, chunk: int, lanes: int) -> int:
        """Number of elements in a tensor of `checkpoint_shape`."""
        return math.prod(self.checkpoint_shape(chunk, lanes))


class ScanArguments(NamedTuple):
    """Arguments of `vilonghorn.ops.scan`, which explains them."""

    x: Tensor  # (G, B, L, D)
    dt: Tensor  # (G, B, L, D)
    k: Tensor  # (G, B, L, N)
    q: Tensor  # (G, B, L, N)
    z: Tensor | None = None  # (B, L, D)
    A: Tensor | None = None  # mamba only: (G, D, N), or of each token, (G, B, L, N)
    D: Tensor | None = None  # (G, D)
    dt_bias: Tensor | None = None  # (G, D)
    rule: str = "longhorn"
    reverse: Sequence[int] = (False,)
    reduce: str = "none"
    backend: str | None = None

    @property
    def sizes(self) -> Sizes:
        """Sizes that the shapes say, unchecked."""
        G, B, L, D = self.x.shape
        return Sizes(G, B, L, D, self.k.shape[-1])

    @property
    def output_shape(self) -> tuple[int, ...]:
        """(G, B, L, D), or (B, L, D) with reduce="mean"."""
        return tuple(self.x.shape[1:] if self.reduce == "mean" else self.x.shape)

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of gates, state and accumulation: float32, or float64 for float64 inputs."""
        return torch.promote_types(self.x.dtype, torch.float32)


def _mixer_sizes(args: MambaInnerArguments | BlockArguments) -> Sizes:
    (B, L, _), (G, D, K), R = args[0].shape, args.conv_weight.shape, args.dt_proj.shape[-1]
    return Sizes(G, B, L, D, (args.x_proj.shape[1] - R) // 2, K, R)


class MambaInnerArguments(NamedTuple):
    """Arguments of `vilonghorn.ops.mamba_inner` with separate directions, which explains them."""

    xz: Tensor  # (B, L, 2D)
    conv_weight: Tensor  # (G, D, K)
    conv_bias: Tensor  # (G, D)
    x_proj: Tensor  # (G, R + 2N, D)
    dt_proj: Tensor  # (G, D, R)
    dt_bias: Tensor  # (G, D)
    A: Tensor | None  # (G, D, N), mamba only
    D: Tensor  # (G, D)
    rule: str
    reverse: Sequence[int]

    @property
    def sizes(self) -> Sizes:
        """Sizes that the shapes say, unchecked."""
        return _mixer_sizes(self)


class BlockArguments(NamedTuple):
    """Arguments of `vilonghorn.ops.block`, which explains them."""

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

    @property
    def sizes(self) -> Sizes:
        """Sizes that the shapes say, unchecked."""
        return _mixer_sizes(self)


class ConvArguments(NamedTuple):
    """Arguments of `vilonghorn.ops.conv_silu`, which explains them."""

    x: Tensor  # (B, L, D)
    weight: Tensor  # (G, D, K)
    bias: Tensor  # (G, D)
    reverse: Sequence[int]


class NormArguments(NamedTuple):
    """Arguments of `vilonghorn.ops.rms_norm`, which explains them."""

    x: Tensor  # (..., C)
    weight: Tensor  # (C,)
    eps: float


def validate_scan(args: ScanArguments) -> Sizes:
    """Checks the arguments of a scan and returns their sizes. Raises ValueError or TypeError, like all checks here."""
    for name, tensor in zip(args._fields, args[:4]):  # the dispatcher accepts None
        if tensor is None:
            raise TypeError(f"scan: {name} is None, expected a tensor")
    if args.reduce not in REDUCTIONS:
        raise ValueError(f"scan: reduce is {args.reduce!r}, expected one of {', '.join(map(repr, REDUCTIONS))}")
    _check_rule("scan", args.rule, args.A)
    _check_dimensions("scan", args, x="(G, B, L, D)", k="(G, B, L, N)")
    sizes = G, B, L, D, N, *_ = args.sizes
    _check_range("scan", "N", N, MAX_STATE)
    _check_directions("scan", args.reverse, G)
    activations = dict(dt=(G, B, L, D), k=(G, B, L, N), q=(G, B, L, N), z=(B, L, D))
    A = (G, B, L, N) if args.A is not None and args.A.dim() == 4 else (G, D, N)
    shapes = dict(x=(G, B, L, D), **activations, A=A, D=(G, D), dt_bias=(G, D))
    _check_tensors("scan", args, shapes, f"x {(G, B, L, D)} and N = {N}")
    for name in activations:
        tensor = getattr(args, name)
        if tensor is not None and tensor.dtype != args.x.dtype:
            raise TypeError(f"scan: {name} is {tensor.dtype} but x is {args.x.dtype}; expected one dtype")
    return sizes


def validate_mamba_inner(args: MambaInnerArguments) -> Sizes:
    """Checks the arguments of `mamba_inner` and returns their sizes."""
    return _validate_mixer("mamba_inner", args, lambda sizes: dict(xz=(sizes.B, sizes.L, 2 * sizes.D)), xz="(B, L, 2D)")


def validate_block(args: BlockArguments) -> Sizes:
    """Checks the arguments of `block`, which is for float32 tokens on the CPU, and returns their sizes."""

    def shapes(s: Sizes) -> dict[str, tuple[int, ...]]:
        dim = args.x.shape[-1]
        return dict(x=(s.B, s.L, dim), norm_weight=(dim,), in_proj=(2 * s.D, dim), out_proj=(dim, s.D))

    sizes = _validate_mixer("block", args, shapes, x="(B, L, dim)")
    for name, tensor in zip(args._fields, args[:11]):
        if tensor is not None and tensor.dtype != torch.float32:
            raise TypeError(f"block: {name} is {tensor.dtype}, expected torch.float32")
    if not args.x.is_cpu or args.x.numel() == 0:
        raise ValueError(f"block: x has shape {tuple(args.x.shape)} on {args.x.device}, expected tokens on the CPU")
    return sizes


def _validate_mixer(operator: str, args: MambaInnerArguments | BlockArguments, shapes, **tokens: str) -> Sizes:
    _check_rule(operator, args.rule, args.A)
    weights = dict(conv_weight="(G, D, K)", x_proj="(G, R + 2N, D)", dt_proj="(G, D, R)")
    _check_dimensions(operator, args, **tokens, **weights)
    sizes = G, _, _, D, N, K, R = args.sizes
    _check_directions(operator, args.reverse, G)
    for name, size, most in (("D", D, D), ("N", N, MAX_STATE), ("K", K, MAX_CONV), ("R", R, R)):
        _check_range(operator, name, size, most)
    expected = shapes(sizes) | dict(conv_weight=(G, D, K), conv_bias=(G, D), x_proj=(G, R + 2 * N, D))
    expected |= dict(dt_proj=(G, D, R), dt_bias=(G, D), A=(G, D, N), D=(G, D))
    reference = f"conv_weight {tuple(args.conv_weight.shape)} and dt_proj {tuple(args.dt_proj.shape)}"
    _check_tensors(operator, args, expected, reference)
    return sizes


def validate_conv(args: ConvArguments) -> None:
    """Checks the arguments of `conv_silu`."""
    _check_dimensions("conv_silu", args, x="(B, L, D)", weight="(G, D, K)")
    (B, L, D), (G, _, K) = args.x.shape, args.weight.shape
    _check_directions("conv_silu", args.reverse, G)
    _check_range("conv_silu", "K", K, MAX_CONV)
    shapes = dict(x=(B, L, D), weight=(G, D, K), bias=(G, D))
    _check_tensors("conv_silu", args, shapes, f"x {(B, L, D)} and weight {tuple(args.weight.shape)}")


def validate_norm(args: NormArguments) -> None:
    """Checks shapes and devices of `rms_norm`."""
    x, weight, _ = args
    if x.dim() < 1 or weight.shape != x.shape[-1:]:
        shape, x_shape = tuple(weight.shape), tuple(x.shape)
        raise ValueError(f"rms_norm: weight has shape {shape}, expected the last dimension of x {x_shape}")
    if weight.device != x.device:
        raise ValueError(f"rms_norm: weight is on {weight.device} but x is on {x.device}; move them to one device")


def check_flags(operator: str, reverse: Sequence[bool]) -> list[int]:
    """Checks `reverse` and returns it as integers: torch.jit.trace takes no lists of booleans."""
    if not (isinstance(reverse, (tuple, list)) and all(isinstance(flag, int) and flag in (0, 1) for flag in reverse)):
        raise TypeError(f"{operator}: reverse is {reverse!r}, expected a tuple with True or False for each direction")
    return [int(flag) for flag in reverse]


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast gives activations like x, or None. float64 stays float64, as in torch's own operators."""
    device_type = x.device.type
    if device_type == "meta" or x.dtype == torch.float64:  # torch raises for meta, which has no autocast
        return None
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def _check_rule(operator: str, rule: str, A: Tensor | None) -> None:
    if rule not in RULES:
        raise ValueError(f"{operator}: rule is {rule!r}, expected one of {', '.join(map(repr, RULES))}")
    if (A is None) == (rule == "mamba"):
        needs = "needs A of shape (G, D, N)" if rule == "mamba" else "takes no A (only rule 'mamba' does)"
        raise ValueError(f"{operator}: rule {rule!r} {needs}")


def _check_directions(operator: str, reverse: Sequence[int], G: int) -> None:
    if G < 1 or len(reverse) != G:
        raise ValueError(f"{operator}: reverse has {len(reverse)} flags for {G} directions, expected one for each")


def _check_range(operator: str, name: str, size: int, most: int) -> None:
    if not 1 <= size <= most:
        raise ValueError(f"{operator}: {name} is {size}, expected {f'1 to {most}' if most > 1 else 'at least 1'}")


def _check_dimensions(operator: str, args: NamedTuple, **expected: str) -> None:
    for name, dimensions in expected.items():
        shape = tuple(getattr(args, name).shape)
        if len(shape) != dimensions.count(",") + 1:
            raise ValueError(f"{operator}: {name} has shape {shape}, expected {dimensions}")


def _check_tensors(operator: str, args: NamedTuple, shapes: dict[str, tuple[int, ...]], reference: str) -> None:
    """Checks shapes, devices and dtypes; `reference` names the tensors that the shapes are taken from."""
    first, device = args._fields[0], args[0].device
    for name, shape in shapes.items():
        tensor = getattr(args, name)
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape:
            given = tuple(tensor.shape)
            raise ValueError(f"{operator}: {name} has shape {given}, expected {shape} to go with {reference}")
        if tensor.device != device:
            raise ValueError(f"{operator}: {name} is on {tensor.device} but {first} is on {device}")
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{operator}: {name} is {tensor.dtype}, expected one of {', '.join(map(str, DTYPES))}")
