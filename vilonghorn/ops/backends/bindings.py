"""The C interface of `kernels/`: its structs, how they are filled with tensors, and how a library is opened.

Structs and fields have the names of kernels/include/vilonghorn.h. A struct is packed into bytes by its fields' names,
and ctypes passes the address of the bytes.
"""

import ctypes
import functools
import shlex
import struct
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ... import __version__
from ..arguments import CHANNELS_FIRST, LAYOUTS, BlockArguments, ConvArguments, ScanArguments, by_channel, named_tensors
from ..rules import NO_RULE, RULES

ABI = 27  # VL_ABI
_NONE = 3  # VL_NONE
UNKNOWN_RULE = -1  # VL_UNKNOWN_RULE
DTYPE_NUMBERS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}  # VL_FLOAT32, ...


def library_path(name: str) -> Path:
    """Where the build puts the library of a backend."""
    suffix = {"darwin": "dylib", "win32": "dll"}.get(sys.platform, "so")
    return Path(__file__).parents[2] / "_lib" / f"libvilonghorn_{name}.{suffix}"


def open_library(name: str, requirement: str) -> tuple[ctypes.CDLL | None, str | None]:
    """The library of a backend and None, or None and why it is not available. Building it needs `requirement`."""
    path = library_path(name)
    if not path.exists():  # in a clone after `pip install .`, Python imports the source tree, which has no libraries
        installed = next(iter(metadata.distributions(name="vilonghorn")), None)
        found = installed and Path(str(installed.locate_file(f"vilonghorn/_lib/{path.name}")))
        if not (found and found.exists() and installed.version == __version__):
            remedy = _how_to_build(name, path.parents[2], installed, requirement)
            return None, f"not built: {path} does not exist. {remedy}"
        path = found
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return None, f"{path} does not load: {error}"
    interface = library.vl_abi() if hasattr(library, "vl_abi") else "none"
    if interface != ABI:
        return None, f"{path} has interface version {interface}, expected {ABI}: install vilonghorn again"
    return library, None


def _how_to_build(name: str, root: Path, installed: metadata.Distribution | None, requirement: str) -> str:
    """What to run. `root` holds the package that was imported: a source tree, or the folder of installed packages."""
    if (root / "kernels").is_dir():
        found = "no vilonghorn with it is installed"
        if installed and installed.version != __version__:
            found = f"the installed vilonghorn is {installed.version}, not {__version__}"
        problem = f"The library with {name.upper()} kernels was not built in this source tree, and {found}"
        source = f"--editable {shlex.quote(str(root))}"
    else:
        problem = f"vilonghorn was installed without it, as without {requirement} or with VILONGHORN_{name.upper()}=OFF"
        source = "--force-reinstall --no-deps --no-cache-dir PATH_OF_A_CLONE"
    if name == "cuda":  # the build leaves its kernels out unless they are asked for
        source += " --config-settings=cmake.define.VILONGHORN_CUDA=ON"
    return f"{problem}. Where there is {requirement}, run: {shlex.quote(sys.executable)} -m pip install {source}"


def rule_number(rule: str) -> int:
    """The number of a rule in the libraries. A library returns UNKNOWN_RULE for a rule that it does not have."""
    return _NONE if rule == NO_RULE else RULES[rule].number


class Struct:
    """A struct of the C interface.

    Its `fields` are kinds and names: "q" (int64), "i" (int32), "d" (double) and "P" (an address) as in Python's
    `struct`; "input" for a VlInput, an address NAME and the strides NAME_direction, NAME_batch and NAME_step; "grid"
    for a VlConvGrid; or another struct, whose fields it has.
    """

    def __init__(self, *fields: "str | Struct"):
        self.names: list[str] = []
        self.kinds = ""
        for field in fields:
            kind, *names = field.split() if isinstance(field, str) else (field.kinds, *field.names)
            if kind == "input":
                names = [part for name in names for part in (name, *(f"{name}_{of}" for of in INPUT_STRIDES))]
                kind = "Pqqq" * (len(names) // 4)
            elif kind == "grid":
                kind, names = "qqqP", ["rows", "columns", "height", "neighbors"]
            self.names += names
            self.kinds += kind * len(names) if len(kind) == 1 else kind
        self.layout = struct.Struct(self.kinds)
        self.zeros: dict[str, Any] = dict.fromkeys(self.names, 0)

    def pack(self, values: dict[str, Any]) -> bytes:
        """The struct with `values` by the names of its fields; the others are zero."""
        if len(values) < len(self.zeros):
            values = self.zeros | values
        return self.layout.pack(*values.values())

    def offset(self, name: str) -> int:
        """The place of a field, in bytes."""
        index = self.names.index(name)
        end = struct.calcsize(self.kinds[: index + 1])
        return end - struct.calcsize(self.kinds[index])


INPUT_STRIDES = ("direction", "batch", "step")  # in elements; the last dimension of an input is contiguous
SCAN = Struct(
    "q directions batch length channels states chunk channel_splits",
    "i rule mean dtype threads channels_first",
    "P reverse",
    "input x dt k q z",
    "P A D dt_bias initial_state y saved_states final_state accumulator",
    "input dy",
    "P dfinal_state",
    "P dx ddt dk dq",
    "q dk_step",
    "P dz",
    "q dz_step",
    "P dA dD ddt_bias dinitial_state partials",
)
MAMBA_INNER = Struct(  # `dxz` is the gradient of the mixer's input, VlMambaInner.dx
    SCAN,
    "q d_conv dt_rank num_heads",
    "grid",
    "P conv_weight conv_bias x_proj dt_proj drop_scales projected",
    "P dprojected dxz dconv_weight dconv_bias dx_proj ddt_proj",
)
NORM = Struct(
    "q batch channels",
    "i dtype threads",
    "d eps",
    "P x weight y scale dy add dx dweight",
    "i dy_dtype",
    "P partials",
)
CONV = Struct(
    "q directions batch length channels d_conv channel_splits",
    "i dtype threads",
    "P reverse",
    "input x",
    "grid",
    "input z",
    "P weight bias y",
    "input dy",
    "P dx dz",
    "q dx_step",
    "P dweight dbias partials",
)
_BLOCK_TENSORS = LAYOUTS[BlockArguments].tensors
BLOCK_WEIGHTS = [name for name in _BLOCK_TENSORS if name != "drop_scales"]  # and x: the tensors with gradients
BLOCK_GRADIENTS = [f"d{name}" for name in BLOCK_WEIGHTS]
BLOCK_NUMBERS = Struct(  # VlBlock to `reverse`
    "q batch length dim directions channels states d_conv dt_rank num_heads chunk channel_splits hidden",
    "i rule threads bf16_parts save",
    "d eps mlp_eps",
    "grid",
    "P reverse",
)
BLOCK_POINTERS = Struct(  # the rest of VlBlock
    " ".join(["P", *_BLOCK_TENSORS]),
    "P out xz projected saved_states mid gv dout",
    " ".join(["P", *BLOCK_GRADIENTS]),
    "P in_proj_scale out_proj_scale mlp_in_proj_scale mlp_out_proj_scale packed",
)
BLOCK = Struct(BLOCK_NUMBERS, BLOCK_POINTERS)


@functools.cache
def _flags(reverse: tuple[int, ...]) -> Any:
    return ctypes.create_string_buffer(bytes(reverse), len(reverse))


def flags_address(reverse: Sequence[int]) -> int:
    """The address of a constant array of flags, which is kept."""
    return ctypes.addressof(_flags(tuple(reverse)))


def grid_fields(conv_grid: Sequence[int]) -> dict[str, int]:
    """The fields of a VlConvGrid of a `conv_grid`; none for a convolution over the sequence."""
    return dict(zip(("rows", "columns", "height"), conv_grid))


class Params:
    """Collects the fields of the struct of one kernel call, and keeps references to the tensors that it points to."""

    def __init__(self, struct: Struct, dtype: torch.dtype, device: torch.device, **fields: Any):
        self.struct, self.dtype, self.device = struct, dtype, device
        self.compute_dtype = torch.float64 if dtype == torch.float64 else torch.float32  # of all but activations
        self.tensors: list[Tensor] = []  # the struct holds only their addresses
        self.fields: dict[str, Any] = {"dtype": DTYPE_NUMBERS[dtype], **fields}

    def pack(self) -> bytes:
        """The struct, which is valid as long as these parameters are held."""
        return self.struct.pack(self.fields)

    def pointer(self, name: str, t: Tensor) -> Tensor:
        """Sets a field to a tensor that already has the layout and dtype that the kernel takes, and returns it."""
        self.tensors.append(t)
        self.fields[name] = t.data_ptr()
        return t

    def activation(self, name: str, t: Tensor | None) -> None:
        """Sets an input of 4 dimensions, or of 3 for all directions; copied if dtype or last stride do not fit."""
        if t is None:
            return
        if t.dtype != self.dtype:
            t = t.to(self.dtype)
        if t.stride(-1) != 1:
            t = t.contiguous()
        *direction, batch, step, _ = t.stride()
        self.pointer(name, t)
        for of, stride in zip(INPUT_STRIDES, (*direction, batch, step) if direction else (0, batch, step)):
            self.fields[f"{name}_{of}"] = stride

    def parameter(self, name: str, t: Tensor | None) -> None:
        """Sets a field to a contiguous tensor of the compute dtype."""
        if t is not None:
            self.pointer(name, (t if t.dtype == self.compute_dtype else t.to(self.compute_dtype)).contiguous())

    def output(
        self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Allocates what the kernel writes to a field, by default an activation; `out` takes the place of it."""
        t = torch.empty(shape, dtype=dtype or self.dtype, device=self.device) if out is None else out
        return self.pointer(name, t)

    def gradient(self, name: str, of: Tensor | None) -> Tensor | None:
        """Allocates the gradient of a parameter, in the compute dtype; None if the parameter is absent."""
        return None if of is None else self.output(name, of.shape, self.compute_dtype)


def conv_params(args: ConvArguments, dtype: torch.dtype) -> Params:
    """The inputs of a convolution in `dtype`."""
    G, B, L, D, _, K, *_ = args.sizes
    sizes = dict(directions=G, batch=B, length=L, channels=D, d_conv=K, dx_step=D)
    sizes |= grid_fields(args.conv_grid)
    params = Params(CONV, dtype, args.x.device, reverse=flags_address(args.reverse), **sizes)
    params.activation("x", args.x)
    params.parameter("weight", args.weight)
    params.parameter("bias", args.bias)
    return params


class ScanParams(Params):
    """A scan of validated arguments; `chunk` is the backend's STATE_EVERY."""

    ACTIVATIONS = ("x", "dt", "k", "q", "z")

    def __init__(self, args: ScanArguments, dtype: torch.dtype, chunk: int):
        G, B, L, D, N, *_ = args.sizes
        sizes = dict(directions=G, batch=B, length=L, channels=D, states=N, chunk=chunk, channel_splits=1)
        options = dict(rule=rule_number(args.rule), mean=args.reduce == "mean", reverse=flags_address(args.reverse))
        options |= dict(channels_first=args.channels_first)
        super().__init__(SCAN, dtype, args.x.device, **sizes, **options, dk_step=N, dz_step=D)
        self.args = args
        for name in self.ACTIVATIONS:
            self.activation(name, getattr(args, name))
        for name in ("A", "D", "dt_bias", "initial_state"):
            self.parameter(name, getattr(args, name))

    def activation(self, name: str, t: Tensor | None) -> None:
        """As `Params.activation`, with tokens and channels exchanged where the channels come first."""
        is_first = t is not None and self.args.channels_first and name in (*CHANNELS_FIRST, "dy")
        super().activation(name, t.mT if is_first else t)  # type: ignore[union-attr]

    def forward_outputs(self, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Allocates y and the last state; returns them and `states`, which the kernel writes if they are not empty."""
        y, state = self.args.new_outputs(self.dtype)
        for name, t in (("y", y), ("saved_states", states), ("final_state", state)):
            self.pointer(name, t)
        return y, state, states

    def backward_outputs(
        self, dy: Tensor, dstate: Tensor | None, saved_states: Tensor, out: Mapping[str, Tensor] = {}
    ) -> dict[str, Tensor | None]:
        """Sets the inputs of backward, and allocates the gradients of the tensors, by the tensors' names.

        dk and dq have channel splits as axis 0. `out` may hold tensors for the gradients of k, q and z.
        """
        self.activation("dy", dy)
        self.parameter("dfinal_state", dstate)
        self.pointer("saved_states", saved_states)
        splits = self.fields["channel_splits"]
        grads: dict[str, Tensor | None] = {}
        for name, t in named_tensors(self.args).items():
            if t is None or name not in self.ACTIVATIONS:
                grads[name] = self.gradient(f"d{name}", t)
                continue
            axes, given = (splits,) if splits > 1 and name in ("k", "q") else (), out.get(name)
            if self.args.channels_first and name in CHANNELS_FIRST:
                given = by_channel(t, self.dtype)
            grads[name] = self.output(f"d{name}", (*axes, *t.shape), out=given)
        return grads
