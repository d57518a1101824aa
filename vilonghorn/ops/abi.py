"""The C interface of `kernels/` as ctypes sees it: its structs, and what fills them with tensors.

Shared by the backends that call compiled libraries, which are looked for in `vilonghorn/_lib`, where the build puts
them. What a library exports beyond its structs is the backends' own matter.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import torch
from torch import Tensor

from .arguments import RULES, ScanArguments

ABI = 5  # VL_ABI of kernels/scan.h
_int, _long, _pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)  # in the order of VL_FLOAT32 and its kin


def library_path(name: str) -> Path:
    """Where the library of a backend lies if it is built."""
    file = {"darwin": f"libvilonghorn_{name}.dylib", "win32": f"vilonghorn_{name}.dll"}
    return Path(__file__).parent.parent / "_lib" / file.get(sys.platform, f"libvilonghorn_{name}.so")


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
        *((n, _long) for n in ("batch", "channels", "parts")),
        *((n, _int) for n in ("dtype", "threads")),
        ("eps", ctypes.c_double),
        *((n, _pointer) for n in ("x", "weight", "y", "scale", "dy", "dx", "dweight")),
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
        *((n, _long) for n in ("rows", "columns", "depth", "parts")),
        ("threads", _int),
        *((n, _pointer) for n in ("a", "b")),
        *((n, _long) for n in ("a_row", "a_depth", "b_depth", "b_column", "out_row")),
        *((n, _pointer) for n in ("out", "packed")),
    ]


class Call:
    """Fills a struct, and keeps what it points to alive until the call is over.

    Args:
        struct: a `Scan`, `Conv` or the `Scan` of a `Mix`.
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
        """A new tensor for the kernel to fill, of the activations' dtype unless another is given."""
        t = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        self.set(struct, **{name: t})
        return t

    def input(self, t: Tensor | None) -> Input:
        """An activation of 3 or 4 dimensions, copied only where its dtype differs or its last stride is not 1."""
        if t is None:
            return Input()
        t = t.to(self.dtype)
        if t.stride(-1) != 1:
            t = t.contiguous()
        self.alive.append(t)
        group = t.stride(0) if t.dim() == 4 else 0
        return Input(t.data_ptr(), group, t.stride(-3), t.stride(-2))

    def parameters(self, struct=None, **tensors: Tensor | None) -> None:
        """Contiguous tensors by the name of their field, converted to the dtype of states."""
        self.set(struct, **{name: None if t is None else t.to(self.real).contiguous() for name, t in tensors.items()})

    def set(self, struct=None, **tensors: Tensor | None) -> None:
        """Pointers to tensors that are as the kernel wants them, by the name of their field in `struct`, another than
        the call's own if given."""
        for name, t in tensors.items():
            if t is not None:
                self.alive.append(t)
                setattr(struct or self.struct, name, t.data_ptr())


class ScanCall(Call):
    """A scan of checked arguments; `chunk` and `lanes` are the backend's CHUNK and LANES."""

    def __init__(self, args: ScanArguments, dtype: torch.dtype, chunk: int, lanes: int):
        G, B, L, D = args.x.shape
        N = args.k.shape[-1]
        struct = Scan(groups=G, batch=B, length=L, channels=D, states=N, chunk=chunk)
        super().__init__(struct, dtype, args.reverse, args.x.device)
        self.args = args
        struct.rule, struct.mean, struct.dz_step = RULES.index(args.rule), args.reduce == "mean", D
        for name in ("x", "dt", "k", "q", "z"):
            setattr(struct, name, self.input(getattr(args, name)))
        self.parameters(A=args.A, D=args.D, dt_bias=args.dt_bias)
        self.checkpoint_shape = (G, B, -(-L // chunk), N, -(-D // lanes) * lanes)

    def forward_outputs(self, save: bool) -> tuple[Tensor, Tensor]:
        """y and the checkpoints (an empty tensor without `save`)."""
        y = self.output("y", self.args.output_shape)
        if not save:
            return y, torch.empty(0, dtype=self.real, device=self.device)
        return y, self.output("checkpoints", self.checkpoint_shape, self.real)

    def backward_outputs(self, dy: Tensor, checkpoints: Tensor, segments: int = 1) -> dict[str, Tensor]:
        """Sets what backward reads, and returns what it fills, by field; dk and dq have a leading axis of `parts`, dA, dD
        and ddt_bias one of the segments of all sequences."""
        args, struct = self.args, self.struct
        dy = dy.to(self.dtype)  # before it is expanded, which would copy it for each direction
        struct.dy = self.input(dy.expand(args.x.shape) if args.reduce == "mean" else dy)
        self.set(checkpoints=checkpoints)
        G, B, L, D = args.x.shape
        N = args.k.shape[-1]
        tokens, rows = (struct.parts, G, B, L, N), B * segments
        activations = dict(dx=(G, B, L, D), ddt=(G, B, L, D), dz=(B, L, D))
        sums = dict(dk=tokens, dq=tokens, dA=(rows, G, D, N), dD=(rows, G, D), ddt_bias=(rows, G, D))
        present = [f"d{name}" for name in args.tensors()]
        outputs = {n: self.output(n, shape) for n, shape in activations.items() if n in present}
        return outputs | {n: self.output(n, shape, self.real) for n, shape in sums.items() if n in present}

    def gradients(self, outputs: dict[str, Tensor]) -> tuple[Tensor | None, ...]:
        """The operator's gradients out of what backward filled: sums over parts and batch, in the inputs' dtypes."""
        grads = []
        for name in ("x", "dt", "k", "q", "z", "A", "D", "dt_bias"):
            grad, tensor = outputs.get(f"d{name}"), getattr(self.args, name)
            if grad is not None and grad.dim() > tensor.dim():
                grad = grad[0] if len(grad) == 1 else grad.sum(0)
            grads.append(None if grad is None else grad.to(tensor.dtype))
        return tuple(grads)
