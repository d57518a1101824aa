"""Arguments of the operators, tensors first, and their sizes.

Annotations have the shapes, which `validate` checks. Backends and kernels receive validated arguments.
"""

import math
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import torch
from torch import Tensor


class Sizes(NamedTuple):
    """Sizes of a scan, and of the mixer around it."""

    G: int  # directions
    B: int  # batch
    L: int  # tokens
    D: int  # channels
    N: int = 1  # state size
    K: int = 1  # taps of the convolution
    R: int = 1  # rank of dt
    H: int = 1  # heads, whose channels share dt

    def saved_state_shape(self, chunk: int, lanes: int) -> tuple[int, int, int, int, int]:
        """Shape of the states before every `chunk`-th step, with channels padded to a multiple of `lanes`."""
        return self.G, self.B, (self.L + chunk - 1) // chunk, self.N, (self.D + lanes - 1) // lanes * lanes

    def empty_states(self, like: Tensor, chunk: int, lanes: int, dtype: torch.dtype, save: bool) -> Tensor:
        """Memory for states of `saved_state_shape`, in one dimension, on the device of `like`; none without `save`.

        With more dimensions, torch.compile would guard on a number of chunks of 1.
        """
        return like.new_empty(math.prod(self.saved_state_shape(chunk, lanes)) if save else 0, dtype=dtype)


class ScanArguments(NamedTuple):
    """Arguments of `vilonghorn.ops.scan`, which explains them."""

    x: Annotated[Tensor, "G B L D"]
    dt: Annotated[Tensor, "G B L H"]
    k: Annotated[Tensor, "G B L N"]
    q: Annotated[Tensor, "G B L N"]
    z: Annotated[Tensor | None, "B L D"] = None
    A: Annotated[Tensor | None, "G D N"] = None
    D: Annotated[Tensor | None, "G D"] = None
    dt_bias: Annotated[Tensor | None, "G H"] = None
    rule: str = "longhorn"
    reverse: Sequence[int] = (False,)
    reduce: str = "none"
    backend: str | None = None

    @property
    def sizes(self) -> Sizes:
        """Sizes that the shapes say, unchecked."""
        G, B, L, D = self.x.shape
        return Sizes(G, B, L, D, self.k.shape[-1], H=self.dt.shape[-1])

    @property
    def has_heads(self) -> bool:
        """Whether channels share dt."""
        return self.dt.shape[-1] != self.x.shape[-1]

    def with_channel_steps(self) -> "ScanArguments":
        """Repeats dt and its bias for the channels of a head."""
        if not self.has_heads:
            return self
        size = self.x.shape[-1] // self.dt.shape[-1]
        dt_bias = None if self.dt_bias is None else self.dt_bias.repeat_interleave(size, -1)
        return self._replace(dt=self.dt.repeat_interleave(size, -1), dt_bias=dt_bias)

    @property
    def output_shape(self) -> tuple[int, ...]:
        """(G, B, L, D), or (B, L, D) with reduce="mean"."""
        return tuple(self.x.shape[1:] if self.reduce == "mean" else self.x.shape)

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of gates, state and accumulation: float32, or float64 for float64 inputs."""
        return torch.promote_types(self.x.dtype, torch.float32)


class MambaInnerArguments(NamedTuple):
    """Arguments of `vilonghorn.ops.mamba_inner` with separate directions, which explains them."""

    xz: Annotated[Tensor, "B L 2D"]
    conv_weight: Annotated[Tensor, "G D K"]
    conv_bias: Annotated[Tensor, "G D"]
    x_proj: Annotated[Tensor | None, "G R+2N D"]
    dt_proj: Annotated[Tensor | None, "G H R"]
    dt_bias: Annotated[Tensor | None, "G H"]
    A: Annotated[Tensor | None, "G D N"]
    D: Annotated[Tensor | None, "G D"]
    rule: str
    reverse: Sequence[int]
    conv_grid: Sequence[int] = ()  # of `flatten_filter`

    @property
    def sizes(self) -> Sizes:
        """Sizes that the shapes say, unchecked."""
        return _mixer_sizes(self)


class BlockArguments(NamedTuple):
    """Arguments of `vilonghorn.ops.block`, which explains them."""

    x: Annotated[Tensor, "B L dim"]
    norm_weight: Annotated[Tensor, "dim"]
    in_proj: Annotated[Tensor, "2D dim"]
    conv_weight: Annotated[Tensor, "G D K"]
    conv_bias: Annotated[Tensor, "G D"]
    x_proj: Annotated[Tensor | None, "G R+2N D"]
    dt_proj: Annotated[Tensor | None, "G H R"]
    dt_bias: Annotated[Tensor | None, "G H"]
    A: Annotated[Tensor | None, "G D N"]
    D: Annotated[Tensor | None, "G D"]
    out_proj: Annotated[Tensor, "dim D"]
    mlp_norm_weight: Annotated[Tensor | None, "dim"]
    mlp_in_proj: Annotated[Tensor | None, "2M dim"]
    mlp_out_proj: Annotated[Tensor | None, "dim M"]
    drop_scales: Annotated[Tensor | None, "branches B"]
    rule: str
    reverse: Sequence[int]
    eps: float
    mlp_eps: float
    bf16: bool
    conv_grid: Sequence[int] = ()  # of `flatten_filter`

    @property
    def sizes(self) -> Sizes:
        """Sizes that the shapes say, unchecked."""
        return _mixer_sizes(self)


def _mixer_sizes(args: "MambaInnerArguments | BlockArguments") -> Sizes:
    (B, L, _), (G, D, K) = args[0].shape, args.conv_weight.shape
    if args.x_proj is None or args.dt_proj is None:
        return Sizes(G, B, L, D, 0, K, 0, 0)
    _, H, R = args.dt_proj.shape
    return Sizes(G, B, L, D, (args.x_proj.shape[1] - R) // 2, K, R, H)


class ConvArguments(NamedTuple):
    """Arguments of `vilonghorn.ops.conv_silu`, which explains them."""

    x: Annotated[Tensor, "B L D"]
    weight: Annotated[Tensor, "G D K"]
    bias: Annotated[Tensor, "G D"]
    reverse: Sequence[int]
    backend: str | None = None
    conv_grid: Sequence[int] = ()  # of `flatten_filter`, for the CUDA library; `reverse` is not used then

    @property
    def sizes(self) -> Sizes:
        """Sizes that the shapes say, unchecked."""
        (G, _, K), (B, L, D) = self.weight.shape, self.x.shape
        return Sizes(G, B, L, D, K=K)


class NormArguments(NamedTuple):
    """Arguments of `vilonghorn.ops.rms_norm`, which explains them."""

    x: Tensor  # (..., C)
    weight: Tensor  # (C,)
    eps: float

    @property
    def sizes(self) -> Sizes:
        """Rows as B and channels as D."""
        C = self.x.shape[-1]
        return Sizes(1, self.x.numel() // max(C, 1), 1, C)
