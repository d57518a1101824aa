"""Arguments of the operators, their sizes, and the checks of both.

Backends and kernels receive validated arguments, and read their sizes from `args.sizes`.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

RULES = ("longhorn", "longhorn_exact", "mamba")  # of a scan; a mixer and a block also have "none"
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
    N: int = 1  # state size
    K: int = 1  # tokens in the convolution
    R: int = 1  # rank of dt

    def saved_state_shape(self, chunk: int, lanes: int) -> tuple[int, int, int, int, int]:
        """Shape of the states before every `chunk`-th step, with channels padded to a multiple of `lanes`."""
        return self.G, self.B, (self.L + chunk - 1) // chunk, self.N, (self.D + lanes - 1) // lanes * lanes

    def num_saved_states(self, chunk: int, lanes: int) -> int:
        """Number of elements in a tensor of `saved_state_shape`."""
        return math.prod(self.saved_state_shape(chunk, lanes))


class ScanArguments(NamedTuple):
    """Arguments of `vilonghorn.ops.scan`, which explains them. Annotations have the shapes, here and below."""

    x: Annotated[Tensor, "G B L D"]
    dt: Annotated[Tensor, "G B L D"]
    k: Annotated[Tensor, "G B L N"]
    q: Annotated[Tensor, "G B L N"]
    z: Annotated[Tensor | None, "B L D"] = None
    A: Annotated[Tensor | None, "G D N"] = None  # rule "mamba" only
    D: Annotated[Tensor | None, "G D"] = None
    dt_bias: Annotated[Tensor | None, "G D"] = None
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


def saved_state_dtype(dtype: torch.dtype, rule: str) -> torch.dtype:
    """Dtype in which kernels on GPUs save states beside activations of a dtype.

    bfloat16 halves the memory. The exact rule takes small differences of a state, which it would lose.
    """
    return torch.bfloat16 if dtype == torch.bfloat16 and rule != "longhorn_exact" else torch.float32


def _mixer_sizes(args: "MambaInnerArguments | BlockArguments") -> Sizes:
    (B, L, _), (G, D, K) = args[0].shape, args.conv_weight.shape
    if args.dt_proj is None or args.x_proj is None:
        return Sizes(G, B, L, D, 0, K, 0)
    R = args.dt_proj.shape[-1]
    return Sizes(G, B, L, D, (args.x_proj.shape[1] - R) // 2, K, R)


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
    conv_grid: Sequence[int] = ()  # of `with_grid`

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
    conv_grid: Sequence[int] = ()  # of `with_grid`

    @property
    def sizes(self) -> Sizes:
        """Sizes that the shapes say, unchecked."""
        return _mixer_sizes(self)


class ConvArguments(NamedTuple):
    """Arguments of `vilonghorn.ops.conv_silu`, which explains them."""

    x: Annotated[Tensor, "B L D"]
    weight: Annotated[Tensor, "G D K"]
    bias: Annotated[Tensor, "G D"]
    reverse: Sequence[int]
    backend: str | None = None

    @property
    def sizes(self) -> Sizes:
        """Sizes that the shapes say, unchecked."""
        (G, _, K), (B, L, D) = self.weight.shape, self.x.shape
        return Sizes(G, B, L, D, K=K)


class ChunkArguments(NamedTuple):
    """Arguments of `vilonghorn.ops.chunked.scan_chunked`, which explains them."""

    x: Annotated[Tensor, "G B L D"]
    dt: Annotated[Tensor, "G B L H"]
    k: Annotated[Tensor, "G B L N"]
    q: Annotated[Tensor, "G B L N"]
    D: Annotated[Tensor | None, "G D"]
    dt_bias: Annotated[Tensor | None, "G H"]
    reverse: Sequence[int]

    @property
    def sizes(self) -> Sizes:
        """Sizes that the shapes say, unchecked."""
        G, B, L, D = self.x.shape
        return Sizes(G, B, L, D, self.k.shape[-1])


class NormArguments(NamedTuple):
    """Arguments of `vilonghorn.ops.rms_norm`, which explains them."""

    x: Tensor  # (..., C)
    weight: Tensor  # (C,)
    eps: float


# By operator and tensor: the names of its dimensions.
_SHAPES = {
    arguments: {
        name: hint.__metadata__[0].split()
        for name, hint in get_type_hints(arguments, include_extras=True).items()
        if hasattr(hint, "__metadata__")
    }
    for arguments in (ScanArguments, MambaInnerArguments, BlockArguments, ConvArguments, ChunkArguments)
}


def validate(operator: str, args: Any, sources: Sequence[str]) -> Sizes:
    """Checks the arguments of an operator and returns their sizes.

    Args:
        operator: its name, for errors.
        args: its arguments, a NamedTuple of this module.
        sources: the tensors that `args.sizes` reads.

    Raises:
        ValueError: a rule, shape, size, device or number of flags that does not fit.
        TypeError: a tensor is missing or its dtype is not one of DTYPES.
    """
    shapes = _SHAPES[type(args)]
    if hasattr(args, "rule"):
        _check_rule(operator, args.rule, args.A)
    if getattr(args, "rule", "") == "none":
        sources = [name for name in sources if name not in ("x_proj", "dt_proj")]
    values: dict[str, int] = {}  # by name of a dimension
    for name in sources:
        tensor, dimensions = getattr(args, name), shapes[name]
        if tensor.dim() != len(dimensions):
            given = tuple(tensor.shape)
            raise ValueError(f"{operator}: {name} has shape {given}, expected ({', '.join(dimensions)})")
        values.update(zip(dimensions, tensor.shape))
    sizes = args.sizes
    G, _, _, D, N, K, R = sizes
    if G < 1 or len(args.reverse) != G:
        raise ValueError(f"{operator}: reverse has {len(args.reverse)} flags for {G} directions, expected one for each")
    values |= sizes._asdict() | {"2D": 2 * D, "R+2N": R + 2 * N}
    if isinstance(args, BlockArguments):
        hidden = 0 if args.mlp_out_proj is None else args.mlp_out_proj.shape[1]
        values |= {"M": hidden, "2M": 2 * hidden, "branches": 1 + (hidden > 0)}
    device = args[0].device
    for (name, dimensions), tensor in zip(shapes.items(), args):  # tensors are the first arguments
        if tensor is None:
            continue
        expected = tuple([values[dimension] for dimension in dimensions])
        if tensor.shape != expected:
            fits = " and ".join(f"{source} {tuple(getattr(args, source).shape)}" for source in sources)
            given = tuple(tensor.shape)
            raise ValueError(f"{operator}: {name} has shape {given}, expected {expected} to go with {fits}")
        if tensor.device != device:
            raise ValueError(f"{operator}: {name} is on {tensor.device} but {args._fields[0]} is on {device}")
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{operator}: {name} is {tensor.dtype}, expected one of {', '.join(map(str, DTYPES))}")
    limits = [("N", N, MAX_STATE), ("K", K, MAX_CONV)]
    limits += [("D", D, D), ("R", R, R)] if "dt_proj" in shapes else []
    for name, size, most in limits:
        if not (name in "NR" and getattr(args, "rule", "") == "none") and not 1 <= size <= most:
            raise ValueError(f"{operator}: {name} is {size}, expected {f'1 to {most}' if most > 1 else 'at least 1'}")
    return sizes


def validate_scan(args: ScanArguments) -> Sizes:
    """Checks the arguments of a scan and returns their sizes."""
    _check_activations("scan", args)
    if args.reduce not in REDUCTIONS:
        raise ValueError(f"scan: reduce is {args.reduce!r}, expected one of {', '.join(map(repr, REDUCTIONS))}")
    sizes = validate("scan", args, ("x", "k"))
    for name, activation in zip(args._fields[1:5], args[1:5]):
        if activation is not None and activation.dtype != args.x.dtype:
            raise TypeError(f"scan: {name} is {activation.dtype} but x is {args.x.dtype}; expected one dtype")
    return sizes


def _check_activations(operator: str, args: "ScanArguments | ChunkArguments") -> None:
    for name, tensor in zip(args._fields, args[:4]):  # the dispatcher accepts None
        if tensor is None:
            raise TypeError(f"{operator}: {name} is None, expected a tensor")


def validate_chunks(args: ChunkArguments) -> Sizes:
    """Checks the arguments of `scan_chunked` and returns their sizes."""
    _check_activations("scan_chunked", args)
    sizes, heads = validate("scan_chunked", args, ("x", "dt", "k")), args.dt.shape[-1]
    if not heads or sizes.D % heads:
        raise ValueError(f"scan_chunked: dt has {heads} heads, expected a divisor of the {sizes.D} channels")
    return sizes


def validate_block(args: BlockArguments) -> Sizes:
    """Checks the arguments of `block`, which is for float32 tokens on the CPU, and returns their sizes."""
    sizes = validate("block", args, ("x", "conv_weight", "x_proj", "dt_proj"))
    _check_kernel_grid("block", sizes, args.conv_grid)
    _check_cpu_tokens("block", args, 15)
    return sizes


def _check_cpu_tokens(operator: str, args: Any, num_tensors: int) -> None:
    for name, tensor in zip(args._fields, args[:num_tensors]):
        if tensor is not None and tensor.dtype != torch.float32:
            raise TypeError(f"{operator}: {name} is {tensor.dtype}, expected torch.float32")
        if tensor is not None and tensor.device != args.x.device:
            raise ValueError(f"{operator}: {name} is on {tensor.device} but x is on {args.x.device}")
    if not args.x.is_cpu or args.x.numel() == 0:
        given = f"x has shape {tuple(args.x.shape)} on {args.x.device}"
        raise ValueError(f"{operator}: {given}, expected tokens on the CPU")


def validate_mamba_inner(args: MambaInnerArguments) -> Sizes:
    """Checks the arguments of `mamba_inner` and returns their sizes."""
    sizes = validate("mamba_inner", args, ("xz", "conv_weight", "x_proj", "dt_proj"))
    _check_kernel_grid("mamba_inner", sizes, args.conv_grid)
    return sizes


# Checks of the arguments of `conv_silu`.
validate_conv = partial(validate, "conv_silu", sources=("x", "weight"))


def validate_norm(args: NormArguments) -> None:
    """Checks shapes and devices of `rms_norm`."""
    x, weight, _ = args
    if x.dim() < 1 or weight.shape != x.shape[-1:]:
        shape, x_shape = tuple(weight.shape), tuple(x.shape)
        raise ValueError(f"rms_norm: weight has shape {shape}, expected the last dimension of x {x_shape}")
    if weight.device != x.device:
        raise ValueError(f"rms_norm: weight is on {weight.device} but x is on {x.device}; move them to one device")


def check_grid(operator: str, tokens: int, grid: Sequence[int]) -> None:
    """Checks that so many tokens are the patches of a grid, perhaps with a class token."""
    if len(grid) != 2 or any(size < 1 for size in grid):
        raise ValueError(f"{operator}: grid is {tuple(grid)}, expected rows and columns")
    rows, columns = grid
    patches = rows * columns
    if tokens not in (patches, patches + 1):
        raise ValueError(
            f"{operator}: {tokens} tokens, expected {patches}, the patches of a {rows} x {columns} grid, or "
            f"{patches + 1} with a class token"
        )


def with_grid(operator: str, conv_weight: Tensor, grid: Sequence[int] | None) -> tuple[Tensor, list[int]]:
    """The filter as the kernels take it, (G, D, K), and what they need to know of the grid.

    This is nothing for a convolution over the sequence. For a filter (G, D, height, width) it is rows, columns, height
    and width. Operators check it.

    Raises:
        ValueError: a filter over a grid without one.
    """
    if conv_weight.dim() != 4:
        return conv_weight, []
    if grid is None:
        raise ValueError(
            f"{operator}: conv_weight {tuple(conv_weight.shape)} is a filter over a grid of patches, but grid is "
            "None; give grid=(rows, columns), or a convolution over the sequence (an integer d_conv)"
        )
    return conv_weight.flatten(2), [*grid, *conv_weight.shape[2:]]


def _check_kernel_grid(operator: str, sizes: Sizes, grid: Sequence[int]) -> None:
    """Checks what `with_grid` makes."""
    if not grid:
        return
    check_grid(operator, sizes.L, grid[:-2])
    height, width = grid[-2:]
    if height * width != sizes.K or not (height % 2 and width % 2):
        raise ValueError(f"{operator}: the filter is {height} x {width}, expected an odd height and an odd width")


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
    if rule not in RULES and (rule != "none" or operator not in ("mamba_inner", "block")):
        raise ValueError(f"{operator}: rule is {rule!r}, expected one of {', '.join(map(repr, RULES))}")
    if (A is None) == (rule == "mamba"):
        needs = "needs A of shape (G, D, N)" if rule == "mamba" else "takes no A (only rule 'mamba' does)"
        raise ValueError(f"{operator}: rule {rule!r} {needs}")
