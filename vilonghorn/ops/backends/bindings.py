"""The C interface of `kernels/` for ctypes: its structs, how they are filled with tensors, and how a library is opened.

Structs and fields have the names of kernels/include/vilonghorn.h, without the prefix "Vl".
"""

import ctypes
import functools
import json
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
from ..arguments import BlockArguments, ConvArguments, ScanArguments
from ..rules import NO_RULE, RULES

ABI = 21  # VL_ABI
_INT, _LONG, _POINTER = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
_NONE = 3  # VL_NONE
UNKNOWN_RULE = -1  # VL_UNKNOWN_RULE
_DTYPES = (torch.float32, torch.float64, torch.bfloat16)  # in the order of VL_FLOAT32, ...


def library_path(name: str) -> Path:
    """Where the build puts the library of a backend."""
    suffix = {"darwin": "dylib", "win32": "dll"}.get(sys.platform, "so")
    return Path(__file__).parents[2] / "_lib" / f"libvilonghorn_{name}.{suffix}"


def open_library(name: str, requirement: str) -> tuple[ctypes.CDLL | None, str | None]:
    """Opens the library of a backend; returns it and None, or None and the reason why it is not available.

    In a clone after `pip install .`, Python imports the source tree, which has no libraries, in place of the installed
    package. It then opens those of the installed package, if that has the same version. `requirement` is what a machine
    needs to build the library.
    """
    path = library_path(name)
    if not path.exists():
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
        found = "no vilonghorn with this library is installed"
        if installed and installed.version != __version__:
            found = f"the installed vilonghorn is {installed.version}, not {__version__}"
        problem, source = f"This source tree is not built, and {found}", f"--editable {shlex.quote(str(root))}"
    else:
        problem = f"vilonghorn was installed without it, as without {requirement} or with VILONGHORN_{name.upper()}=OFF"
        url = json.loads(installed and installed.read_text("direct_url.json") or "{}").get("url", "")
        folder = url if url.startswith("file:") and not url.endswith(".whl") else "PATH_OF_A_CLONE"
        source = f"--force-reinstall --no-deps --no-cache-dir {folder}"
    if name == "cuda":  # the build leaves its kernels out unless they are asked for
        source += " --config-settings=cmake.define.VILONGHORN_CUDA=ON"
    return f"{problem}. Where there is {requirement}, run: {shlex.quote(sys.executable)} -m pip install {source}"


def _fields(ctype: type, names: str) -> list[tuple[str, type]]:
    return [(name, ctype) for name in names.split()]


def rule_number(rule: str) -> int:
    """The number of a rule in the libraries. A library returns UNKNOWN_RULE for a rule that it does not have."""
    return _NONE if rule == NO_RULE else RULES[rule].number


class Input(ctypes.Structure):
    """An activation with strides in elements; its last dimension is contiguous."""

    _fields_ = [*_fields(_POINTER, "data"), *_fields(_LONG, "direction batch step")]


class Scan(ctypes.Structure):
    """A scan and its gradients."""

    _fields_ = [
        *_fields(_LONG, "directions batch length channels states chunk channel_splits"),
        *_fields(_INT, "rule mean dtype threads"),
        ("reverse", ctypes.c_char_p),
        *_fields(Input, "x dt k q z"),
        *_fields(_POINTER, "A D dt_bias y saved_states accumulator"),
        *_fields(Input, "dy"),
        *_fields(_POINTER, "dx ddt dk dq"),
        *_fields(_LONG, "dk_step"),
        *_fields(_POINTER, "dz"),
        *_fields(_LONG, "dz_step"),
        *_fields(_POINTER, "dA dD ddt_bias partials"),
    ]


class ConvGrid(ctypes.Structure):
    """A grid of patches and the height of the filter, whose width follows from the number of taps; zeros for none."""

    _fields_ = [*_fields(_LONG, "rows columns height"), *_fields(_POINTER, "neighbors")]


class MambaInner(ctypes.Structure):
    """A mixer without its input and output projections."""

    _fields_ = [
        ("scan", Scan),
        *_fields(_LONG, "d_conv dt_rank num_heads"),
        ("conv_grid", ConvGrid),
        *_fields(_POINTER, "conv_weight conv_bias x_proj dt_proj drop_scales projected"),
        *_fields(_POINTER, "dprojected dx dconv_weight dconv_bias dx_proj ddt_proj"),
    ]


class Norm(ctypes.Structure):
    """An RMS norm."""

    _fields_ = [
        *_fields(_LONG, "batch channels"),
        *_fields(_INT, "dtype threads"),
        ("eps", ctypes.c_double),
        *_fields(_POINTER, "x weight y scale dy add dx dweight"),
    ]


class Conv(ctypes.Structure):
    """A depthwise convolution with SiLU."""

    _fields_ = [
        *_fields(_LONG, "directions batch length channels d_conv channel_splits"),
        *_fields(_INT, "dtype threads"),
        ("reverse", ctypes.c_char_p),
        *_fields(Input, "x"),
        ("conv_grid", ConvGrid),
        *_fields(_POINTER, "weight bias y"),
        *_fields(Input, "dy"),
        *_fields(_POINTER, "dx"),
        *_fields(_LONG, "dx_step"),
        *_fields(_POINTER, "dweight dbias partials sums dv"),
    ]


BLOCK_TENSORS = BlockArguments._fields[:14]  # those that have a gradient
BLOCK_OUTPUTS = 7 + len(BLOCK_TENSORS) + 5  # pointers from `out` on; the last 5: four scales and `packed`
# VlBlock: sizes, options, eps, the grid, then the pointers. A ctypes.Structure takes three times as long to fill.
BLOCK = struct.Struct(f"12q4i2d3qPP{len(BLOCK_TENSORS)}PP{BLOCK_OUTPUTS}P")


@functools.cache
def flags_address(reverse: tuple[int, ...]) -> tuple[int, Any]:
    """The address of a constant array of flags, and the array."""
    array = ctypes.create_string_buffer(bytes(reverse), len(reverse))
    return ctypes.addressof(array), array


class Params:
    """Fills the struct of one kernel call with activations of a dtype, and keeps references to its tensors."""

    def __init__(self, struct: ctypes.Structure, dtype: torch.dtype, reverse: Sequence[int], device: torch.device):
        self.struct, self.dtype, self.device = struct, dtype, device
        self.compute_dtype = torch.float64 if dtype == torch.float64 else torch.float32  # of all but activations
        self.tensors = []  # the struct holds only their addresses
        struct.dtype = _DTYPES.index(dtype)
        if reverse:
            struct.reverse = bytes(reverse)

    def pointer(self, t: Tensor) -> int:
        """A pointer to a tensor that already has the layout and dtype that the kernel takes."""
        self.tensors.append(t)
        return t.data_ptr()

    def activation(self, t: Tensor | None) -> Input:
        """A view of 4 dimensions, or of 3 for all directions; copied if dtype or last stride do not fit."""
        if t is None:
            return Input()
        if t.dtype != self.dtype:
            t = t.to(self.dtype)
        if t.stride(-1) != 1:
            t = t.contiguous()
        *direction, batch, step, _ = t.stride()
        return Input(self.pointer(t), *direction or (0,), batch, step)

    def parameter(self, t: Tensor | None) -> int | None:
        """A pointer to a contiguous tensor of the compute dtype."""
        if t is None:
            return None
        return self.pointer((t if t.dtype == self.compute_dtype else t.to(self.compute_dtype)).contiguous())

    def output(
        self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None, struct=None, out: Tensor | None = None
    ) -> Tensor:
        """Allocates what the kernel writes to field `name` (of `struct`, if given), by default an activation.

        `out` takes the place of a new tensor.
        """
        t = torch.empty(shape, dtype=dtype or self.dtype, device=self.device) if out is None else out
        setattr(struct or self.struct, name, self.pointer(t))
        return t

    def gradient(self, name: str, of: Tensor | None, struct=None) -> Tensor | None:
        """Allocates the gradient of a parameter, in the compute dtype; None if the parameter is absent."""
        return None if of is None else self.output(name, of.shape, self.compute_dtype, struct)


def conv_params(args: ConvArguments, dtype: torch.dtype) -> Params:
    """The inputs of a convolution in `dtype`."""
    G, B, L, D, _, K, *_ = args.sizes
    struct = Conv(G, B, L, D, K, dx_step=D, conv_grid=ConvGrid(*args.conv_grid[:3]))
    params = Params(struct, dtype, args.reverse, args.x.device)
    params.struct.x = params.activation(args.x)
    params.struct.weight, params.struct.bias = params.parameter(args.weight), params.parameter(args.bias)
    return params


class ScanParams(Params):
    """A scan of validated arguments; `chunk` and `lanes` are the backend's CHUNK and LANES."""

    def __init__(self, args: ScanArguments, dtype: torch.dtype, chunk: int, lanes: int):
        G, B, L, D, N, *_ = args.sizes
        struct = Scan(G, B, L, D, N, chunk, 1, rule_number(args.rule), args.reduce == "mean", dk_step=N, dz_step=D)
        super().__init__(struct, dtype, args.reverse, args.x.device)
        self.args = args
        struct.x, struct.dt, struct.k, struct.q, struct.z = map(self.activation, args[:5])
        struct.A, struct.D, struct.dt_bias = map(self.parameter, args[5:8])
        self.saved_state_shape = args.sizes.saved_state_shape(chunk, lanes)

    def forward_outputs(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Allocates y; returns it and `states`, which the kernel writes if they are not empty."""
        self.struct.saved_states = self.pointer(states)
        return self.output("y", self.args.output_shape), states

    def backward_outputs(
        self, dy: Tensor, saved_states: Tensor, key_dtype: torch.dtype, out: Mapping[str, Tensor] = {}
    ) -> list[Tensor | None]:
        """Sets the inputs of backward, and allocates the gradients of the tensors, in their order.

        dk and dq have `key_dtype`, and channel splits as axis 0. `out` may hold tensors for those of k, q and z.
        """
        struct, grads = self.struct, []
        struct.dy, struct.saved_states = self.activation(dy), self.pointer(saved_states)
        splits = (struct.channel_splits,) if struct.channel_splits > 1 else ()
        kinds = dict.fromkeys(("x", "dt", "z"), ((), self.dtype)) | dict.fromkeys(("k", "q"), (splits, key_dtype))
        for name, t in zip(self.args._fields[:8], self.args):
            axes, dtype = kinds.get(name, ((), self.compute_dtype))
            grads.append(None if t is None else self.output(f"d{name}", (*axes, *t.shape), dtype, out=out.get(name)))
        return grads
