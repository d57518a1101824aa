"""Arguments of the operators, tensors first, and their sizes.

Annotations have the shapes, which `validate` checks. Backends and kernels receive validated arguments. Weights that
always travel together are a group. The dispatcher knows no groups: `flatten` and `unflatten` convert.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_type_hints

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

    def empty_states(self, like: Tensor, chunk: int, lanes: int, dtype: torch.dtype, save: bool) -> Tensor:
        """Memory for the states before every `chunk`-th step, on the device of `like`; none without `save`.

        (G, B, chunks, N, D), with D padded to a multiple of `lanes`, in one dimension: with more dimensions,
        torch.compile would guard on a number of chunks of 1.
        """
        chunks, channels = (self.L + chunk - 1) // chunk, (self.D + lanes - 1) // lanes * lanes
        return like.new_empty(self.G * self.B * chunks * self.N * channels if save else 0, dtype=dtype)


CHANNELS_FIRST = ("x", "dt", "z")  # whose channels lie before the tokens with `channels_first`


def by_channel(t: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Memory like t, (G, B, L, D) or (B, L, D), whose channels lie before the tokens: (B, G, D, L) or (B, D, L)."""
    *G, B, L, D = t.shape
    return t.new_empty((B, *G, D, L), dtype=dtype).movedim(0, len(G)).mT


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
    initial_state: Annotated[Tensor | None, "G B N D"] = None
    rule: str = "longhorn"
    reverse: Sequence[int] = (False,)
    reduce: str = "none"
    backend: str | None = None
    return_state: bool = False
    channels_first: bool = False

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
        size = self.x.shape[-1] // self.dt.shape[-1]
        dt_bias = None if self.dt_bias is None else self.dt_bias.repeat_interleave(size, -1)
        return self._replace(dt=self.dt.repeat_interleave(size, -1), dt_bias=dt_bias)

    @property
    def output_shape(self) -> tuple[int, ...]:
        """(G, B, L, D), or (B, L, D) with reduce="mean"."""
        G, *shape = self.x.shape
        return tuple(shape if self.reduce == "mean" else (G, *shape))

    def new_outputs(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Memory for y, of x's dtype or another, and for the last state, which is empty if it is not returned."""
        (G, B, _, D, N, *_), x = self.sizes, self.x
        y = by_channel(x, dtype) if self.channels_first else x.new_empty(self.output_shape, dtype=dtype)
        return y, x.new_empty((G, B, N, D) if self.return_state else 0, dtype=self.compute_dtype)

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of gates, state and accumulation: float32, or float64 for float64 inputs."""
        return torch.float64 if self.x.dtype == torch.float64 else torch.float32


class MixerWeights(NamedTuple):
    """Weights of a mixer between its two linear layers, G sets of them (1 for shared directions)."""

    conv_weight: Annotated[Tensor, "G D K"]  # or a filter over the grid, which `flatten_weights` flattens
    conv_bias: Annotated[Tensor, "G D"]
    x_proj: Annotated[Tensor | None, "G R+2N D"] = None  # like the following, none without a scan (rule "none")
    dt_proj: Annotated[Tensor | None, "G H R"] = None
    dt_bias: Annotated[Tensor | None, "G H"] = None
    A: Annotated[Tensor | None, "G D N"] = None
    D: Annotated[Tensor | None, "G D"] = None


class MlpWeights(NamedTuple):
    """Weights of a block's gated MLP and of the norm before it."""

    norm_weight: Annotated[Tensor, "dim"]
    in_proj: Annotated[Tensor, "2M dim"]
    out_proj: Annotated[Tensor, "dim M"]


class MambaInnerArguments(NamedTuple):
    """Arguments of `vilonghorn.ops.mamba_inner` with separate directions, which explains them."""

    xz: Annotated[Tensor, "B L 2D"]
    weights: MixerWeights
    rule: str
    reverse: Sequence[int]
    conv_grid: Sequence[int] = ()  # of `flatten_weights`
    in_chunks: bool = False  # of `backends.runs_in_chunks`, for the CUDA library

    @property
    def sizes(self) -> Sizes:
        """Sizes that the shapes say, unchecked."""
        return _mixer_sizes(self.xz, self.weights)


class BlockArguments(NamedTuple):
    """Arguments of `vilonghorn.ops.block`, which explains them."""

    x: Annotated[Tensor, "B L dim"]
    norm_weight: Annotated[Tensor, "dim"]
    in_proj: Annotated[Tensor, "2D dim"]
    weights: MixerWeights
    out_proj: Annotated[Tensor, "dim D"]
    mlp: MlpWeights | None
    drop_scales: Annotated[Tensor | None, "branches B"]
    rule: str
    reverse: Sequence[int]
    eps: float
    mlp_eps: float
    bf16: bool
    conv_grid: Sequence[int] = ()  # of `flatten_weights`

    @property
    def sizes(self) -> Sizes:
        """Sizes that the shapes say, unchecked."""
        return _mixer_sizes(self.x, self.weights)

    @property
    def hidden(self) -> int:
        """Width of the MLP, or 0."""
        return 0 if self.mlp is None else self.mlp.out_proj.shape[1]


def _mixer_sizes(x: Tensor, weights: MixerWeights) -> Sizes:
    (B, L, _), (G, D, K) = x.shape, weights.conv_weight.shape
    if weights.x_proj is None or weights.dt_proj is None:
        return Sizes(G, B, L, D, 0, K, 0, 0)
    _, H, R = weights.dt_proj.shape
    return Sizes(G, B, L, D, (weights.x_proj.shape[1] - R) // 2, K, R, H)


class ConvArguments(NamedTuple):
    """Arguments of `vilonghorn.ops.conv_silu`, which explains them."""

    x: Annotated[Tensor, "B L D"]
    weight: Annotated[Tensor, "G D K"]
    bias: Annotated[Tensor, "G D"]
    reverse: Sequence[int]
    backend: str | None = None
    conv_grid: Sequence[int] = ()  # of `flatten_weights`, for the CUDA library; `reverse` is not used then

    @property
    def sizes(self) -> Sizes:
        """Sizes that the shapes say, unchecked."""
        (G, _, K), (B, L, D) = self.weight.shape, self.x.shape
        return Sizes(G, B, L, D, K=K)


class NormArguments(NamedTuple):
    """Arguments of `vilonghorn.ops.rms_norm`, which explains them."""

    x: Annotated[Tensor, "..."]
    weight: Annotated[Tensor, "C"]
    eps: float


Arguments = TypeVar("Arguments", bound=tuple)


class Layout:
    """How the arguments of an operator, a NamedTuple, become a flat list: groups are replaced by what they hold.

    A flat name begins with the name of its group, except in `weights`. A group that may be None holds optional tensors.
    """

    def __init__(self, kind: type[NamedTuple]):
        self.groups: list[type | None] = []  # of each argument: its group, or None
        self.types: dict[str, Any] = {}  # by flat name: Tensor, Tensor | None, or the type of an option
        self.shapes: dict[str, list[str]] = {}  # by flat name of a tensor: its dimensions
        for name, hint in get_type_hints(kind, include_extras=True).items():
            group = next((part for part in (hint, *get_args(hint)) if hasattr(part, "_fields")), None)
            self.groups.append(group)
            members = {name: hint}
            if group is not None:
                prefix = "" if name == "weights" else f"{name}_"
                members = {prefix + part: of for part, of in get_type_hints(group, include_extras=True).items()}
            for flat, annotated in members.items():
                kind_of, *dimensions = get_args(annotated) if hasattr(annotated, "__metadata__") else (annotated,)
                self.types[flat] = kind_of if group in (None, hint) else kind_of | None
                if dimensions:
                    self.shapes[flat] = dimensions[0].split()
        self.tensors = [*self.shapes]
        self.required = [name for name in self.shapes if self.types[name] is Tensor]  # never None


LAYOUTS: dict[type, Layout] = {}  # of the operators


def flatten(args: tuple) -> list[Any]:
    """The arguments as the dispatcher takes them; an absent group is one None for each tensor."""
    flat: list[Any] = []
    for value, group in zip(args, LAYOUTS[type(args)].groups):
        if group is None:
            flat.append(value)
        else:
            flat += [None] * len(group._fields) if value is None else value  # type: ignore[attr-defined]
    return flat


def unflatten(kind: type[Arguments], flat: Iterable[Any]) -> Arguments:
    """The arguments of an operator from the first values of a flat list or iterator."""
    values = iter(flat)
    return kind(*[next(values) if group is None else _group(group, values) for group in LAYOUTS[kind].groups])


def _group(kind: Any, values: Iterator[Any]) -> Any:
    members = list(islice(values, len(kind._fields)))
    return None if kind is MlpWeights and all(member is None for member in members) else kind(*members)


def tensors(args: tuple) -> list[Tensor | None]:
    """The tensors of the arguments of an operator, in the order of `Layout.tensors`."""
    return list(islice(flatten(args), len(LAYOUTS[type(args)].tensors)))


def named_tensors(args: tuple) -> dict[str, Tensor | None]:
    """The tensors of the arguments of an operator by their flat names."""
    return dict(zip(LAYOUTS[type(args)].tensors, flatten(args)))


def new_gradients(args: tuple) -> list[Tensor | None]:
    """Memory for the gradients of the tensors of the arguments of an operator; None for those absent."""
    by_channels = CHANNELS_FIRST if getattr(args, "channels_first", False) else ()
    like = functools.partial(torch.empty_like, memory_format=torch.contiguous_format)
    tensors = named_tensors(args).items()
    return [None if t is None else by_channel(t) if name in by_channels else like(t) for name, t in tensors]


for _kind in (ScanArguments, MambaInnerArguments, BlockArguments, ConvArguments, NormArguments):
    LAYOUTS[_kind] = Layout(_kind)
