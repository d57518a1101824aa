"""Checks of the operators' arguments: shapes, types, devices, rules."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, get_type_hints

import torch
from torch import Tensor

from .arguments import BlockArguments, ConvArguments, MambaInnerArguments, NormArguments, ScanArguments, Sizes
from .rules import NO_RULE, find_rule

REDUCTIONS = ("none", "mean")
MAX_STATE = 64  # N
MAX_CONV = 64  # K
MAX_REMEMBERED = 4096  # combinations of shapes
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _shapes(arguments: type) -> dict[str, list[str]]:
    """Name and dimensions of each tensor, which are the first arguments."""
    hints = get_type_hints(arguments, include_extras=True).items()
    return {name: hint.__metadata__[0].split() for name, hint in hints if hasattr(hint, "__metadata__")}


_SHAPES = {kind: _shapes(kind) for kind in (ScanArguments, MambaInnerArguments, BlockArguments, ConvArguments)}
_REQUIRED = {kind: [name for name, hint in get_type_hints(kind).items() if hint is Tensor] for kind in _SHAPES}


class Remembered:
    """A check of arguments, which returns their sizes. It recalls them for equal shapes, types and options."""

    def __init__(self, check: Callable[[Any], Sizes]):
        self.check, self.passed = check, dict[tuple, Sizes]()
        functools.update_wrapper(self, check)

    def __call__(self, args: Any) -> Sizes:  # noqa: D102
        if torch.compiler.is_compiling():
            return self.check(args)
        sizes = self.recall(args)
        if sizes is None:
            sizes = self.check(args)
            if len(self.passed) >= MAX_REMEMBERED:
                self.passed.clear()
            with contextlib.suppress(TypeError):  # symbolic sizes and tensors have no hash
                self.passed[_key(args)] = sizes
        return sizes

    def recall(self, args: Any) -> Sizes | None:
        """The sizes of arguments like those that have passed before, else None."""
        try:
            return self.passed.get(_key(args))
        except TypeError:
            return None


def _key(args: Any) -> tuple:
    return tuple([(a.shape, a.dtype, a.device) if isinstance(a, Tensor) else _hashable(a) for a in args])


def _hashable(option: Any) -> Any:
    if not isinstance(option, (list, tuple)):
        return option
    if any([isinstance(value, Tensor) for value in option]):
        raise TypeError("the hash of a tensor does not depend on its value")
    return tuple(option)


def validate(operator: str, args: Any, sources: Sequence[str]) -> Sizes:
    """Checks the arguments of an operator, a NamedTuple of `arguments`, and returns their sizes.

    The sizes come from the tensors that `sources` names. Raises ValueError for a shape, size, device or number of flags
    that does not fit, and TypeError for a tensor that is missing, or has a dtype that is not one of DTYPES.
    """
    shapes = _SHAPES[type(args)]
    for name in _REQUIRED[type(args)]:
        if getattr(args, name) is None:  # the dispatcher accepts None
            raise TypeError(f"{operator}: {name} is None, expected a tensor")
    values: dict[str, int] = {}  # by name of a dimension
    for name in sources:
        tensor, dimensions = getattr(args, name), shapes[name]
        if tensor.dim() != len(dimensions):
            given = tuple(tensor.shape)
            raise ValueError(f"{operator}: {name} has shape {given}, expected ({', '.join(dimensions)})")
        values.update(zip(dimensions, tensor.shape))
    sizes = args.sizes
    G, _, _, D, N, K, R, H = sizes
    if G < 1 or len(args.reverse) != G:
        raise ValueError(f"{operator}: reverse has {len(args.reverse)} flags for {G} directions, expected one for each")
    has_rule = getattr(args, "rule", NO_RULE) != NO_RULE
    if has_rule and H != D and (H < 1 or D % H):
        raise ValueError(f"{operator}: dt has {H} heads, expected a divisor of the {D} channels")
    values.update(zip(sizes._fields, sizes))
    values.update({"2D": 2 * D, "R+2N": R + 2 * N, "2M": 2 * values.get("M", 0)})
    if (scales := getattr(args, "drop_scales", None)) is not None:
        values["branches"] = len(scales)
    device = args[0].device
    for (name, dimensions), tensor in zip(shapes.items(), args):
        if tensor is None:
            continue
        expected = tuple([values.get(dimension, -1) for dimension in dimensions])
        if tensor.shape != expected:
            fits = " and ".join(f"{source} {tuple(getattr(args, source).shape)}" for source in sources)
            given = tuple(tensor.shape)
            raise ValueError(f"{operator}: {name} has shape {given}, expected {expected} to go with {fits}")
        if tensor.device != device:
            raise ValueError(f"{operator}: {name} is on {tensor.device} but {args._fields[0]} is on {device}")
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{operator}: {name} is {tensor.dtype}, expected one of {', '.join(map(str, DTYPES))}")
    for name, size, limit in (("N", N, MAX_STATE), ("K", K, MAX_CONV)):
        if not 1 <= size <= limit and (has_rule or name == "K"):
            raise ValueError(f"{operator}: {name} is {size}, expected 1 to {limit}")
    return sizes


@Remembered
def validate_scan(args: ScanArguments) -> Sizes:
    """Checks the arguments of a scan."""
    if args.reduce not in REDUCTIONS:
        raise ValueError(f"scan: reduce is {args.reduce!r}, expected one of {', '.join(map(repr, REDUCTIONS))}")
    _check_decay("scan", args.rule, args.A)
    sizes = validate("scan", args, ("x", "dt", "k"))
    for name, activation in zip(args._fields[1:5], args[1:5]):
        if activation is not None and activation.dtype != args.x.dtype:
            raise TypeError(f"scan: {name} is {activation.dtype} but x is {args.x.dtype}; expected one dtype")
    return sizes


@Remembered
def validate_conv(args: ConvArguments) -> Sizes:
    """Checks the arguments of `conv_silu`."""
    return validate("conv_silu", args, ("x", "weight"))


@Remembered
def validate_norm(args: NormArguments) -> Sizes:
    """Checks shapes and devices of `rms_norm`."""
    x, weight, _ = args
    if x.dim() < 1 or weight.shape != x.shape[-1:]:
        shape, x_shape = tuple(weight.shape), tuple(x.shape)
        raise ValueError(f"rms_norm: weight has shape {shape}, expected the last dimension of x {x_shape}")
    if weight.device != x.device:
        raise ValueError(f"rms_norm: weight is on {weight.device} but x is on {x.device}; move them to one device")
    return args.sizes


@Remembered
def validate_mamba_inner(args: MambaInnerArguments) -> Sizes:
    """Checks the arguments of `mamba_inner`."""
    return _validate_mixer("mamba_inner", args, ("xz", "conv_weight"))


@Remembered
def validate_block(args: BlockArguments) -> Sizes:
    """Checks the arguments of `block`, float32 tokens on the CPU."""
    mlp = args[11:14]
    if mlp.count(None) not in (0, 3):
        raise ValueError("block: some weights of the MLP are None, expected all three or none")
    sources = ("x", "conv_weight") if mlp[2] is None else ("x", "conv_weight", "mlp_out_proj")
    sizes = _validate_mixer("block", args, sources)
    branches, scales = 1 if mlp[0] is None else 2, args.drop_scales
    if scales is not None and len(scales) != branches:
        raise ValueError(f"block: drop_scales has {len(scales)} rows, expected one for each of {branches} branches")
    for name, tensor in zip(args._fields, args[:15]):
        if tensor is not None and tensor.dtype != torch.float32:
            raise TypeError(f"block: {name} is {tensor.dtype}, expected torch.float32")
    if not args.x.is_cpu or args.x.numel() == 0:
        raise ValueError(f"block: x has shape {tuple(args.x.shape)} on {args.x.device}, expected tokens on the CPU")
    return sizes


def _validate_mixer(operator: str, args: MambaInnerArguments | BlockArguments, sources: tuple[str, ...]) -> Sizes:
    scan_weights = dict(x_proj=args.x_proj, dt_proj=args.dt_proj, dt_bias=args.dt_bias, D=args.D)
    if args.rule == NO_RULE:
        scan_weights["A"] = args.A
    else:
        _check_decay(operator, args.rule, args.A)
        sources = (*sources, "x_proj", "dt_proj")
    for name, weight in scan_weights.items():
        if (weight is None) != (args.rule == NO_RULE):
            raise TypeError(
                f"{operator}: {name} is {'None' if weight is None else 'given'}; rule {NO_RULE!r} takes no weights of "
                "a scan, every other rule x_proj, dt_proj, dt_bias and D"
            )
    sizes = validate(operator, args, sources)
    if args.conv_grid:
        check_grid(operator, sizes.L, args.conv_grid[:-2])
        height, width = args.conv_grid[-2:]
        if height * width != sizes.K or not (height % 2 and width % 2):
            raise ValueError(f"{operator}: the filter is {height} x {width}, expected an odd height and an odd width")
    return sizes


def _check_decay(operator: str, name: str, A: Tensor | None) -> None:
    rule = find_rule(operator, name)
    if (A is None) == rule.has_decay:
        needs = "needs A of shape (G, D, N)" if rule.has_decay else "has no decay rates, but A is given"
        raise ValueError(f"{operator}: rule {name!r} {needs}")


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


def flatten_filter(operator: str, conv_weight: Tensor, grid: Sequence[int] | None) -> tuple[Tensor, list[int]]:
    """Flattens a filter over the grid, (G, D, height, width), to (G, D, K), and adds [rows, columns, height, width].

    A filter over the sequence is returned as it is, with []. Raises ValueError for a filter over a grid without one.
    """
    if conv_weight.dim() != 4:
        return conv_weight, []
    if grid is None:
        raise ValueError(
            f"{operator}: conv_weight {tuple(conv_weight.shape)} is a filter over a grid of patches, but grid is "
            "None; give grid=(rows, columns), or a convolution over the sequence (an integer d_conv)"
        )
    return conv_weight.flatten(2), [*grid, *conv_weight.shape[2:]]


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
