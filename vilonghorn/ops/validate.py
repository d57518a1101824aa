"""Checks of the operators' arguments: shapes, types, devices, rules."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .arguments import (
    LAYOUTS,
    BlockArguments,
    ConvArguments,
    MambaInnerArguments,
    MixerWeights,
    ScanArguments,
    Sizes,
    flatten,
    named_tensors,
)
from .rules import NO_RULE, find_rule

REDUCTIONS = ("none", "mean")
MAX_STATE = 64  # N
MAX_CONV = 64  # K
MAX_REMEMBERED = 4096  # combinations of shapes
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def once(check: Callable[[Any], Sizes]) -> Callable[[Any], Sizes]:
    """Remembers the sizes that a check of arguments returned, for arguments of equal shapes, types and options."""
    passed = dict[tuple, Sizes]()

    @functools.wraps(check)
    def checked(args: Any) -> Sizes:
        if torch.compiler.is_compiling():
            return check(args)
        try:
            sizes = passed.get(key := _key(args))
        except TypeError:  # symbolic sizes and tensors have no hash
            return check(args)
        if sizes is None:
            sizes = check(args)
            if len(passed) >= MAX_REMEMBERED:
                passed.clear()
            passed[key] = sizes
        return sizes

    return checked


def _key(args: Any) -> tuple:
    key: list[Any] = []
    for value in flatten(args):
        if isinstance(value, Tensor):
            key += (value.shape, value.dtype, value.device)
        elif not isinstance(value, (list, tuple)):
            key.append(value)
        elif any([isinstance(item, Tensor) for item in value]):
            raise TypeError("the hash of a tensor does not depend on its value")
        else:
            key.append(tuple(value))
    return tuple(key)


def validate(operator: str, args: Any, sources: Sequence[str]) -> Sizes:
    """Checks the arguments of an operator, a NamedTuple of `arguments`; returns their sizes, which `sources` define."""
    layout = LAYOUTS[type(args)]
    given: dict[str, Any] = named_tensors(args)
    for name in layout.required:
        if given[name] is None:  # the dispatcher accepts None
            raise TypeError(f"{operator}: {name} is None, expected a tensor")
    values: dict[str, int] = {}  # by name of a dimension
    for name in sources:
        tensor, dimensions = given[name], layout.shapes[name]
        if tensor.dim() != len(dimensions):
            shape = tuple(tensor.shape)
            raise ValueError(f"{operator}: {name} has shape {shape}, expected ({', '.join(dimensions)})")
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
    for name, tensor in given.items():
        if tensor is None:
            continue
        expected = tuple([values.get(dimension, -1) for dimension in layout.shapes[name]])
        if tensor.shape != expected:
            fits = " and ".join(f"{source} {tuple(given[source].shape)}" for source in sources)
            shape = tuple(tensor.shape)
            raise ValueError(f"{operator}: {name} has shape {shape}, expected {expected} to go with {fits}")
        if tensor.device != device:
            raise ValueError(f"{operator}: {name} is on {tensor.device} but {args._fields[0]} is on {device}")
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{operator}: {name} is {tensor.dtype}, expected one of {', '.join(map(str, DTYPES))}")
    for name, size, limit in (("N", N, MAX_STATE), ("K", K, MAX_CONV)):
        if not 1 <= size <= limit and (has_rule or name == "K"):
            raise ValueError(f"{operator}: {name} is {size}, expected 1 to {limit}")
    return sizes


@once
def validate_scan(args: ScanArguments) -> Sizes:
    """Checks the arguments of a scan."""
    if args.reduce not in REDUCTIONS:
        raise ValueError(f"scan: reduce is {args.reduce!r}, expected one of {', '.join(map(repr, REDUCTIONS))}")
    if args.channels_first and (args.reduce != "none" or args.z is not None and len(args.reverse) > 1):
        raise ValueError(
            "scan: channels_first is True with reduce='mean' or with z for several directions; add or gate the "
            "directions after the scan"
        )
    _check_decay("scan", args.rule, args.A)
    sizes = validate("scan", args, ("x", "dt", "k"))
    for name, activation in dict(dt=args.dt, k=args.k, q=args.q, z=args.z).items():
        if activation is not None and activation.dtype != args.x.dtype:
            raise TypeError(f"scan: {name} is {activation.dtype} but x is {args.x.dtype}; expected one dtype")
    return sizes


@once
def validate_conv(args: ConvArguments) -> Sizes:
    """Checks the arguments of `conv_silu`."""
    return validate("conv_silu", args, ("x", "weight"))


@once
def validate_mamba_inner(args: MambaInnerArguments) -> Sizes:
    """Checks the arguments of `mamba_inner`."""
    return _validate_mixer("mamba_inner", args, ("xz", "conv_weight"))


@once
def validate_block(args: BlockArguments) -> Sizes:
    """Checks the arguments of `block`, float32 tokens on the CPU."""
    mlp = args.mlp
    if mlp is not None and any(weight is None for weight in mlp):
        raise ValueError("block: some weights of the MLP are None, expected all three or none")
    sources = ("x", "conv_weight") if mlp is None else ("x", "conv_weight", "mlp_out_proj")
    sizes = _validate_mixer("block", args, sources)
    branches, scales = 1 if mlp is None else 2, args.drop_scales
    if scales is not None and len(scales) != branches:
        raise ValueError(f"block: drop_scales has {len(scales)} rows, expected one for each of {branches} branches")
    for name, tensor in named_tensors(args).items():
        if tensor is not None and tensor.dtype != torch.float32:
            raise TypeError(f"block: {name} is {tensor.dtype}, expected torch.float32")
    if not args.x.is_cpu or args.x.numel() == 0:
        raise ValueError(f"block: x has shape {tuple(args.x.shape)} on {args.x.device}, expected tokens on the CPU")
    return sizes


def _validate_mixer(operator: str, args: MambaInnerArguments | BlockArguments, sources: tuple[str, ...]) -> Sizes:
    w = args.weights
    scan_weights = dict(x_proj=w.x_proj, dt_proj=w.dt_proj, dt_bias=w.dt_bias, D=w.D)
    if args.rule == NO_RULE:
        scan_weights["A"] = w.A
    else:
        _check_decay(operator, args.rule, w.A)
        sources = (*sources, "x_proj", "dt_proj")
    for name, weight in scan_weights.items():
        if (weight is None) != (args.rule == NO_RULE):
            raise TypeError(
                f"{operator}: {name} is {'None' if weight is None else 'given'}; rule {NO_RULE!r} takes no weights of "
                "a scan, every other rule x_proj, dt_proj, dt_bias and D"
            )
    sizes = validate(operator, args, sources)
    if args.conv_grid:
        check_grid(operator, sizes.L, sizes.K, args.conv_grid)
    return sizes


def _check_decay(operator: str, name: str, A: Tensor | None) -> None:
    rule = find_rule(operator, name)
    if (A is None) == rule.has_decay:
        needs = "needs A of shape (G, D, N)" if rule.has_decay else "has no decay rates, but A is given"
        raise ValueError(f"{operator}: rule {name!r} {needs}")


def check_grid(operator: str, tokens: int, taps: int, conv_grid: Sequence[int]) -> None:
    """Checks that so many tokens are the patches of a grid, perhaps with a class token, and that its filter is odd.

    `conv_grid`: rows and columns of the grid, height and width of the filter, which has so many `taps`.
    """
    *grid, height, width = conv_grid
    if len(grid) != 2 or any(size < 1 for size in grid):
        raise ValueError(f"{operator}: grid is {tuple(grid)}, expected rows and columns")
    rows, columns = grid
    patches = rows * columns
    if tokens not in (patches, patches + 1):
        raise ValueError(
            f"{operator}: {tokens} tokens, expected {patches}, the patches of a {rows} x {columns} grid, or "
            f"{patches + 1} with a class token"
        )
    if height * width != taps or not (height % 2 and width % 2):
        raise ValueError(f"{operator}: the filter is {height} x {width}, expected an odd height and an odd width")


def flatten_weights(operator: str, weights: MixerWeights, grid: Sequence[int] | None) -> tuple[MixerWeights, list[int]]:
    """Flattens a filter over a grid to (G, D, K), and adds [rows, columns, height, width]; [] for other filters."""
    conv_weight = weights.conv_weight
    if conv_weight.dim() != 4:
        return weights, []
    if grid is None:
        raise ValueError(
            f"{operator}: conv_weight {tuple(conv_weight.shape)} is a filter over a grid of patches, but grid is "
            "None; give grid=(rows, columns), or a convolution over the sequence (an integer d_conv)"
        )
    *_, height, width = conv_weight.shape
    return weights._replace(conv_weight=conv_weight.flatten(2)), [*grid, height, width]


def check_flags(operator: str, reverse: Sequence[int]) -> list[int]:
    """Checks `reverse` and returns it as integers: torch.jit.trace takes no lists of booleans."""
    if not (isinstance(reverse, (tuple, list)) and all(isinstance(flag, int) and flag in (0, 1) for flag in reverse)):
        raise TypeError(f"{operator}: reverse is {reverse!r}, expected a tuple with True or False for each direction")
    return [int(flag) for flag in reverse]
