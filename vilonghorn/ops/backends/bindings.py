"""The C interface of `kernels/` as ctypes sees it: its structs, and what fills them with tensors.

Shared by the backends that call compiled libraries, which are looked for in `vilonghorn/_lib`, where the build puts
them. What a library exports beyond its structs is the backends' own matter.
"""

from __future__ import annotations

import ctypes
import math
import sys
from pathlib import Path

import torch
from torch import Tensor

from ..validate import RULES, ScanArguments, checkpoint_shape

ABI = 8  # VL_ABI of kernels/scan.h
_int, _long, _pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)  # in the order of VL_FLOAT32 and its kin


def library_path(name: str) -> Path:
    """Where the library of a backend lies if it is built."""
    file = {"darwin": f"libvilonghorn_{name}.dylib", "win32": f"vilonghorn_{name}.dll"}
    return Path(__file__).parents[2] / "_lib" / file.get(sys.platform, f"libvilonghorn_{name}.so")


def open_library(name: str, needs: str) -> tuple[ctypes.CDLL | None, str | None]:
    """Opens the library of a backend.

    Args:
        name: of the backend, "cpu" or "cuda".
        needs: what a machine must have to build it, for the message.

    Returns:
        The library and None, or None and the reason why it cannot be had.
    """
    path = library_path(name)
    if not path.exists():
        return None, f"not built: {path.name} is not in {path.parent} (install where there is {needs})"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return None, f"{path} does not load: {error}"
    found = library.vl_abi() if hasattr(library, "vl_abi") else "none"
    if found != ABI:
        return None, f"{path} is of another version (interface {found}, expected {ABI}): install vilonghorn again"
    return library, None


class Input(ctypes.Structure):  # VlInput of kernels/scan.h
    _fields_ = [("data", _pointer), ("group", _long), ("batch", _long), ("step", _long)]


class Scan(ctypes.Structure):  # VlScan
    _fields_ = [
        *((n, _long) for n in ("groups", "batch", "length", "channels", "states", "chunk", "parts")),
        *((n, _int) for n in ("rule", "mean", "dtype", "threads")),
        ("reverse", ctypes.c_char_p),
        *((n, Input) for n in ("x", "dt", "k", "q", "z")),
        *((n, _pointer) for n in ("A", "D", "dt_bias", "y", "checkpoints", "sums")),
        ("dy", Input),
        *((n, _pointer) for n in ("dx", "ddt", "dk", "dq", "dz")),
        ("dz_step", _long),
        *((n, _pointer) for n in ("dA", "dD", "ddt_bias")),
    ]


class Split(ctypes.Structure):  # VlSplit
    _fields_ = [("span", _long), ("summaries", _pointer), ("starts", _pointer)]


class Mix(ctypes.Structure):  # VlMix
    _fields_ = [
        ("scan", Scan),
        *((n, _long) for n in ("taps", "rank")),
        *((n, _pointer) for n in ("conv_weight", "conv_bias", "x_proj", "dt_proj", "projected")),
        *((n, _pointer) for n in ("dprojected", "dx", "dconv_weight", "dconv_bias", "dx_proj", "ddt_proj")),
    ]


class Norm(ctypes.Structure):  # VlNorm
    _fields_ = [
        *((n, _long) for n in ("batch", "channels")),
        *((n, _int) for n in ("dtype", "threads")),
        ("eps", ctypes.c_double),
        *((n, _pointer) for n in ("x", "weight", "y", "scale", "dy", "add", "dx", "dweight")),
    ]


class Conv(ctypes.Structure):  # VlConv
    _fields_ = [
        *((n, _long) for n in ("groups", "batch", "length", "channels", "taps", "parts")),
        *((n, _int) for n in ("dtype", "threads")),
        ("reverse", ctypes.c_char_p),
        ("x", Input),
        *((n, _pointer) for n in ("weight", "bias", "y")),
        ("dy", Input),
        *((n, _pointer) for n in ("dx", "dweight", "dbias")),
    ]


class Matmul(ctypes.Structure):  # VlMatmul
    _fields_ = [
        *((n, _long) for n in ("rows", "columns", "depth")),
        ("threads", _int),
        *((n, _pointer) for n in ("a", "b")),
        *((n, _long) for n in ("a_row", "a_depth", "b_depth", "b_column")),
        *((n, _pointer) for n in ("add", "out")),
    ]


class Block(ctypes.Structure):  # VlBlock
    _fields_ = [
        *(
            (n, _long)
            for n in ("batch", "length", "dim", "groups", "channels", "states", "taps", "rank", "chunk", "parts")
        ),
        *((n, _int) for n in ("rule", "residual", "threads")),
        ("eps", ctypes.c_double),
        ("reverse", ctypes.c_char_p),
        *(
            (n, _pointer)
            for n in ("x", "norm_weight", "in_proj", "conv_weight", "conv_bias", "x_proj", "dt_proj", "dt_bias")
        ),
        *((n, _pointer) for n in ("A", "D", "out_proj", "out", "xz", "projected", "checkpoints")),
        *((n, _pointer) for n in ("dout", "dx", "dnorm_weight", "din_proj", "dconv_weight", "dconv_bias", "dx_proj")),
        *((n, _pointer) for n in ("ddt_proj", "ddt_bias", "dA", "dD", "dout_proj")),
    ]


class Call:
    """Fills a struct, and keeps what it points to alive until the call is over.

    Args:
        struct: a `Scan`, `Conv`, `Norm` or the `Scan` of a `Mix`.
        dtype: of activations; float64 where everything is.
        reverse: a flag for each direction, if there are directions.
        device: of all tensors.
    """

    def __init__(self, struct: ctypes.Structure, dtype: torch.dtype, reverse: tuple[bool, ...], device: torch.device):
        self.struct, self.dtype, self.device = struct, dtype, device
        self.real = torch.float64 if dtype == torch.float64 else torch.float32  # of parameters, states and their sums
        self.alive = []
        struct.dtype = _DTYPES.index(dtype)
        if reverse:
            struct.reverse = bytes(reverse)

    def output(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None, struct=None) -> Tensor:
        """A new tensor for the kernel to fill, of the activations' dtype unless another is given, by the name of its field
        in `struct`, another than the call's own if given."""
        t = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        setattr(struct or self.struct, name, self.pointer(t))
        return t

    def gradient(self, name: str, of: Tensor | None, struct=None) -> Tensor | None:
        """As `output`, of a parameter's gradient; None if the parameter is absent."""
        return None if of is None else self.output(name, of.shape, self.real, struct)

    def input(self, t: Tensor | None) -> Input:
        """An activation of 3 or 4 dimensions, copied only where its dtype differs or its last stride is not 1. The groups
        share one of 3."""
        if t is None:
            return Input()
        if t.dtype != self.dtype:
            t = t.to(self.dtype)
        if t.stride(-1) != 1:
            t = t.contiguous()
        *group, batch, step, _ = t.stride()
        return Input(self.pointer(t), *group or (0,), batch, step)

    def parameter(self, t: Tensor | None) -> int | None:
        """A pointer to the tensor's numbers in the dtype of states, contiguous."""
        if t is None:
            return None
        return self.pointer((t if t.dtype == self.real else t.to(self.real)).contiguous())

    def pointer(self, t: Tensor) -> int:
        """A pointer to a tensor that is as the kernel wants it."""
        self.alive.append(t)
        return t.data_ptr()


class ScanCall(Call):
    """A scan of checked arguments; `chunk` and `lanes` are the backend's CHUNK and LANES."""

    def __init__(self, args: ScanArguments, dtype: torch.dtype, chunk: int, lanes: int):
        (G, B, L, D), N = args.x.shape, args.k.shape[-1]
        struct = Scan(groups=G, batch=B, length=L, channels=D, states=N, chunk=chunk)
        super().__init__(struct, dtype, args.reverse, args.x.device)
        self.args = args
        struct.rule, struct.mean, struct.dz_step = RULES.index(args.rule), args.reduce == "mean", D
        struct.x, struct.dt, struct.k, struct.q, struct.z = map(self.input, args[:5])
        struct.A, struct.D, struct.dt_bias = map(self.parameter, args[5:8])
        self.checkpoint_shape = checkpoint_shape(G, B, L, N, D, chunk, lanes)

    def forward_outputs(self, save: bool) -> tuple[Tensor, Tensor]:
        """y and the checkpoints (an empty tensor without `save`)."""
        y = self.output("y", self.args.output_shape)
        if not save:
            return y, torch.empty(0, dtype=self.real, device=self.device)
        return y, self.output("checkpoints", (math.prod(self.checkpoint_shape),), self.real)

    def backward_outputs(self, dy: Tensor, checkpoints: Tensor) -> tuple[Tensor | None, ...]:
        """Sets what backward reads, and returns the gradients that it fills of x, dt, k, q and z; those of k and q have a
        leading axis where there are `parts`."""
        args, struct, real = self.args, self.struct, self.real
        struct.dy, struct.checkpoints = self.input(dy), self.pointer(checkpoints)
        G, B, L, D = args.x.shape
        keys = args.k.shape if struct.parts == 1 else (struct.parts, *args.k.shape)
        return (
            self.output("dx", (G, B, L, D)),
            self.output("ddt", (G, B, L, D)),
            self.output("dk", keys, real),
            self.output("dq", keys, real),
            None if args.z is None else self.output("dz", (B, L, D)),
        )

    def gradients(self, outputs: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """The operator's gradients out of what backward filled."""
        return tuple(None if grad is None else summed(grad, t) for grad, t in zip(outputs, self.args))


def summed(grad: Tensor, of: Tensor) -> Tensor:
    """A kernel's gradient in the dtype of its tensor, summed over the axis that it has before the tensor's own, if any."""
    if grad.dim() > of.dim():
        grad = grad[0] if len(grad) == 1 else grad.sum(0)
    return grad if grad.dtype == of.dtype else grad.to(of.dtype)
