"""The compiled kernels of `kernels/`: opens the shared object with ctypes and hands it pointers and strides.

Today the CPU library; it knows nothing of torch, and is looked for in `vilonghorn/_lib`, where the build puts it.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import torch
from torch import Tensor

from .arguments import RULES, ScanArguments

NAME = "cpu"
CHUNK = 32  # steps between two saved states: smaller costs memory, larger outgrows the cache in backward
LANES = 16  # channels of a saved state are padded to the widest vector
LIBRARY = Path(__file__).parent.parent / "_lib" / (
    {"darwin": "libvilonghorn_cpu.dylib", "win32": "vilonghorn_cpu.dll"}.get(sys.platform, "libvilonghorn_cpu.so")
)

_int, _long, _pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p


class _Input(ctypes.Structure):
    _fields_ = [("data", _pointer), ("group", _long), ("batch", _long), ("step", _long)]


class _Scan(ctypes.Structure):  # VlScan of kernels/scan.h
    _fields_ = [
        *((n, _long) for n in ("groups", "batch", "length", "channels", "states", "chunk", "parts")),
        *((n, _int) for n in ("rule", "mean", "real64", "threads")),
        ("reverse", ctypes.c_char_p),
        *((n, _Input) for n in ("x", "dt", "k", "q", "z")),
        *((n, _pointer) for n in ("A", "D", "dt_bias", "y", "checkpoints")),
        ("dy", _Input),
        *((n, _pointer) for n in ("dx", "ddt", "dk", "dq", "dz", "dA", "dD", "ddt_bias")),
    ]


class _Conv(ctypes.Structure):  # VlConv of kernels/scan.h
    _fields_ = [
        *((n, _long) for n in ("groups", "batch", "length", "channels", "taps", "parts")),
        *((n, _int) for n in ("real64", "threads")),
        ("reverse", ctypes.c_char_p),
        ("x", _Input),
        *((n, _pointer) for n in ("weight", "bias", "y")),
        ("dy", _Input),
        *((n, _pointer) for n in ("dx", "dweight", "dbias")),
    ]


def _open() -> tuple[ctypes.CDLL | None, str | None]:
    """The library, or None and the reason why it cannot be had."""
    if not LIBRARY.exists():
        return None, f"not built: {LIBRARY.name} is not in {LIBRARY.parent} (install from a machine with a C++ compiler)"
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        return None, f"{LIBRARY} does not load: {error}"
    library.vl_level_name.restype = library.vl_threading.restype = ctypes.c_char_p
    if not any(library.vl_level_runs(level) for level in range(library.vl_levels())):
        return None, f"{LIBRARY.name} holds no instruction set that this processor has"
    return library, None


_library, _reason = _open()


def unavailable(device_type: str) -> str | None:
    """Why the library cannot run on that device type, or None if it can."""
    return "runs on the CPU alone" if device_type != "cpu" else _reason


def levels() -> dict[str, int]:
    """Instruction set levels of the library that this processor runs, by name, the plainest first."""
    if _library is None:
        return {}
    runs = (level for level in range(_library.vl_levels()) if _library.vl_level_runs(level))
    return {_library.vl_level_name(level).decode(): level for level in runs}


def forward(args: ScanArguments, save: bool, level: int = -1) -> tuple[Tensor, Tensor]:
    """The scan, and the states before every CHUNK-th step if `save` (in the kernel's own layout).

    `level` is one of `levels()`; -1 takes the best.
    """
    call = _ScanCall(args)
    y = call.empty(args.output_shape)
    checkpoints = call.empty(call.checkpoint_shape if save else (0,))
    call.set(y=y, checkpoints=checkpoints if save else None)
    _run(_library.vl_scan_forward, call.struct, level)
    return y.to(args.x.dtype), checkpoints


def backward(dy: Tensor, args: ScanArguments, checkpoints: Tensor, level: int = -1) -> tuple[Tensor | None, ...]:
    """Gradients of x, dt, k, q, z, A, D and dt_bias; None for those absent."""
    call = _ScanCall(args)
    G, B, L, D = args.x.shape
    N = args.k.shape[-1]
    call.struct.dy = call.input(dy.expand(args.x.shape) if args.reduce == "mean" else dy)
    dx, ddt = call.empty(args.x.shape), call.empty(args.x.shape)
    dk, dq = (call.empty((call.struct.parts, G, B, L, N)) for _ in range(2))
    dz = None if args.z is None else call.empty((B, L, D))
    dA = None if args.A is None else call.empty((B, G, D, N))
    dD = None if args.D is None else call.empty((B, G, D))
    ddt_bias = None if args.dt_bias is None else call.empty((B, G, D))
    call.set(checkpoints=checkpoints, dx=dx, ddt=ddt, dk=dk, dq=dq, dz=dz, dA=dA, dD=dD, ddt_bias=ddt_bias)
    _run(_library.vl_scan_backward, call.struct, level)
    dk, dq = (t[0] if len(t) == 1 else t.sum(0) for t in (dk, dq))
    dA, dD, ddt_bias = (None if t is None else t.sum(0) for t in (dA, dD, ddt_bias))
    inputs = (args.x, args.dt, args.k, args.q, args.z, args.A, args.D, args.dt_bias)
    grads = (dx, ddt, dk, dq, dz, dA, dD, ddt_bias)
    return tuple(None if g is None else g.to(t.dtype) for g, t in zip(grads, inputs))


def conv_forward(x: Tensor, weight: Tensor, bias: Tensor, reverse: tuple[bool, ...], level: int = -1) -> Tensor:
    """Depthwise convolution with SiLU for each direction; see `vilonghorn.ops.conv_silu`."""
    call = _ConvCall(x, weight, bias, reverse)
    y = call.empty((len(reverse), *x.shape))
    call.set(y=y)
    _run(_library.vl_conv_forward, call.struct, level)
    return y.to(x.dtype)


def conv_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, reverse: tuple[bool, ...], level: int = -1
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias."""
    call = _ConvCall(x, weight, bias, reverse)
    G, D, K = weight.shape
    dx, dweight, dbias = call.empty(x.shape), call.empty((len(x), G, K, D)), call.empty((len(x), G, D))
    call.struct.dy = call.input(dy)
    call.set(dx=dx, dweight=dweight, dbias=dbias)
    _run(_library.vl_conv_backward, call.struct, level)
    return dx.to(x.dtype), dweight.sum(0).mT.contiguous().to(weight.dtype), dbias.sum(0).to(bias.dtype)


class _Call:
    """Fills a struct of the C interface, and keeps what it points to alive until the call is over."""

    def __init__(self, struct: ctypes.Structure, dtype: torch.dtype, reverse: tuple[bool, ...], jobs: int, blocks: int):
        self.struct, self.dtype, self.alive = struct, dtype, []
        struct.real64 = dtype == torch.float64
        struct.threads = torch.get_num_threads()
        struct.reverse = bytes(reverse)
        # Sequences share the work; where they are too few to keep the threads evenly busy, so do parts of the channels.
        wanted = 1 if struct.threads == 1 else -(-4 * struct.threads // max(jobs, 1))
        struct.parts = max(1, min(wanted, blocks))

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=self.dtype)

    def input(self, t: Tensor | None) -> _Input:
        """An input tensor of 3 or 4 dimensions, in the kernel's dtype, copied only where its last stride is not 1."""
        if t is None:
            return _Input()
        t = t.to(self.dtype)
        if t.stride(-1) != 1:
            t = t.contiguous()
        self.alive.append(t)
        group = t.stride(0) if t.dim() == 4 else 0
        return _Input(t.data_ptr(), group, t.stride(-3), t.stride(-2))

    def set(self, **tensors: Tensor | None) -> None:
        """Contiguous tensors, in the kernel's dtype, by the name of their field."""
        for name, t in tensors.items():
            if t is not None:
                t = t.to(self.dtype).contiguous()
                self.alive.append(t)
                setattr(self.struct, name, t.data_ptr())


class _ScanCall(_Call):
    def __init__(self, args: ScanArguments):
        G, B, L, D = args.x.shape
        N = args.k.shape[-1]
        dtype = args.compute_dtype
        lanes = LANES if dtype == torch.float32 else LANES // 2
        struct = _Scan(groups=G, batch=B, length=L, channels=D, states=N, chunk=CHUNK)
        super().__init__(struct, dtype, args.reverse, jobs=B, blocks=-(-D // lanes))
        struct.rule, struct.mean = RULES.index(args.rule), args.reduce == "mean"
        for name in ("x", "dt", "k", "q", "z"):
            setattr(struct, name, self.input(getattr(args, name)))
        self.set(A=args.A, D=args.D, dt_bias=args.dt_bias)
        self.checkpoint_shape = (G, B, -(-L // CHUNK), N, -(-D // LANES) * LANES)


class _ConvCall(_Call):
    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor, reverse: tuple[bool, ...]):
        (B, L, D), (G, _, K) = x.shape, weight.shape
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        struct = _Conv(groups=G, batch=B, length=L, channels=D, taps=K)
        super().__init__(struct, dtype, reverse, jobs=B, blocks=-(-D // LANES))
        struct.x = self.input(x)
        self.set(weight=weight.transpose(1, 2), bias=bias)


def _run(function, struct: ctypes.Structure, level: int) -> None:
    if function(ctypes.byref(struct), level):
        raise RuntimeError(f"the CPU kernel could not run: out of memory, or level {level} is not among {levels()}")
