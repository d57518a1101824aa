"""The compiled kernels of `kernels/` for processors: opens their library with ctypes and calls it.

The structs that it passes are in `abi`; the library knows nothing of torch.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from .abi import Call, Conv, ScanCall, open_library
from .arguments import ScanArguments

NAME = "cpu"
CHUNK = 32  # steps between two saved states: smaller costs memory, larger outgrows the cache in backward
LANES = 16  # channels of a saved state are padded to the widest vector


def _open() -> tuple[ctypes.CDLL | None, str | None]:
    """The library, or None and the reason why it cannot be had."""
    library, reason = open_library(NAME, "a C++ compiler")
    if library is None:
        return None, reason
    library.vl_level_name.restype = library.vl_threading.restype = ctypes.c_char_p
    library.vl_multiply_adds.argtypes, library.vl_multiply_adds.restype = (ctypes.c_int, ctypes.c_int64), ctypes.c_int64
    if not any(library.vl_level_runs(level) for level in range(library.vl_levels())):
        return None, "the library holds no instruction set that this processor has"
    return library, None


_library, _reason = _open()


def unavailable(device_type: str, dtype: torch.dtype = torch.float32) -> str | None:
    """Why the library cannot run on that device type and dtype, or None if it can. It takes every dtype."""
    return "runs on the CPU alone" if device_type != "cpu" else _reason


def levels() -> dict[str, int]:
    """Instruction set levels of the library that this processor runs, by name, the plainest first."""
    if _library is None:
        return {}
    runs = (level for level in range(_library.vl_levels()) if _library.vl_level_runs(level))
    return {_library.vl_level_name(level).decode(): level for level in runs}


def multiply_adds(rounds: int, level: int) -> int:
    """Does nothing but multiply-adds of float32, on this thread and without the GIL; returns how many lanes there were.

    Held against the clock, it tells what the processor can do. `level` is one of `levels()`.
    """
    return _library.vl_multiply_adds(level, rounds)


def forward(args: ScanArguments, save: bool, level: int = -1) -> tuple[Tensor, Tensor]:
    """The scan, and the states before every CHUNK-th step if `save` (in the kernel's own layout).

    `level` is one of `levels()`; -1 takes the best.
    """
    call = _scan_call(args)
    y, checkpoints = call.forward_outputs(save)
    _run(_library.vl_scan_forward, call.struct, level)
    return y.to(args.x.dtype), checkpoints


def backward(dy: Tensor, args: ScanArguments, checkpoints: Tensor, level: int = -1) -> tuple[Tensor | None, ...]:
    """Gradients of x, dt, k, q, z, A, D and dt_bias; None for those absent."""
    call = _scan_call(args)
    outputs = call.backward_outputs(dy, checkpoints)
    _run(_library.vl_scan_backward, call.struct, level)
    return call.gradients(outputs)


def conv_forward(x: Tensor, weight: Tensor, bias: Tensor, reverse: tuple[bool, ...], level: int = -1) -> Tensor:
    """Depthwise convolution with SiLU for each direction; see `vilonghorn.ops.conv_silu`."""
    call = _conv_call(x, weight, bias, reverse)
    y = call.output("y", (len(reverse), *x.shape))
    _run(_library.vl_conv_forward, call.struct, level)
    return y.to(x.dtype)


def conv_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, reverse: tuple[bool, ...], level: int = -1
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias."""
    call = _conv_call(x, weight, bias, reverse)
    G, D, K = weight.shape
    call.struct.dy = call.input(dy)
    dx, dweight, dbias = (
        call.output(name, shape)
        for name, shape in dict(dx=x.shape, dweight=(len(x), G, K, D), dbias=(len(x), G, D)).items()
    )
    _run(_library.vl_conv_backward, call.struct, level)
    return dx.to(x.dtype), dweight.sum(0).mT.contiguous().to(weight.dtype), dbias.sum(0).to(bias.dtype)


def _scan_call(args: ScanArguments) -> ScanCall:
    call = ScanCall(args, args.compute_dtype, CHUNK, LANES)
    _share(call, jobs=args.x.shape[1], channels=args.x.shape[3])
    return call


def _conv_call(x: Tensor, weight: Tensor, bias: Tensor, reverse: tuple[bool, ...]) -> Call:
    (B, L, D), (G, _, K) = x.shape, weight.shape
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    call = Call(Conv(groups=G, batch=B, length=L, channels=D, taps=K), dtype, reverse, x.device)
    call.struct.x = call.input(x)
    call.parameters(weight=weight.transpose(1, 2), bias=bias)
    _share(call, jobs=B, channels=D)
    return call


def _share(call: Call, jobs: int, channels: int) -> None:
    """Sequences share the work; where they are too few to keep the threads evenly busy, so do parts of the channels."""
    threads = torch.get_num_threads()
    lanes = LANES // 2 if call.dtype == torch.float64 else LANES
    wanted = 1 if threads == 1 else -(-4 * threads // max(jobs, 1))
    call.struct.threads, call.struct.parts = threads, max(1, min(wanted, -(-channels // lanes)))


def _run(function, struct: ctypes.Structure, level: int) -> None:
    if function(ctypes.byref(struct), level):
        raise RuntimeError(f"the CPU kernel could not run: out of memory, or level {level} is not among {levels()}")
