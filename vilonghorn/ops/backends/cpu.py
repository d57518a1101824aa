"""The compiled kernels of `kernels/` for processors: opens their library with ctypes and calls it.

The structs that it passes are in `abi`; the library knows nothing of torch.
"""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from ..validate import ScanArguments
from .bindings import Call, Matmul, ScanCall, open_library

NAME = "cpu"
CHUNK = 64  # steps between two saved states: smaller costs memory, larger outgrows the cache in backward
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


library, _reason = _open()


def unavailable(device_type: str, dtype: torch.dtype = torch.float32) -> str | None:
    """Why the library cannot run on that device type and dtype, or None if it can. It takes every dtype."""
    return "runs on the CPU alone" if device_type != "cpu" else _reason


def levels() -> dict[str, int]:
    """Instruction set levels of the library that this processor runs, by name, the plainest first."""
    if library is None:
        return {}
    runs = (level for level in range(library.vl_levels()) if library.vl_level_runs(level))
    return {library.vl_level_name(level).decode(): level for level in runs}


def multiply_adds(rounds: int, level: int) -> int:
    """Does nothing but multiply-adds of float32, on this thread and without the GIL; returns how many lanes there were.

    Held against the clock, it tells what the processor can do. `level` is one of `levels()`.
    """
    return library.vl_multiply_adds(level, rounds)


def forward(args: ScanArguments, save: bool, level: int = -1) -> tuple[Tensor, Tensor]:
    """The scan, and the states before every CHUNK-th step if `save` (in the kernel's own layout).

    `level` is one of `levels()`; -1 takes the best.
    """
    call = _scan_call(args)
    y, checkpoints = call.forward_outputs(save)
    add_up(call, args.reduce == "mean")
    run(library.vl_scan_forward, call.struct, level)
    return y, checkpoints


def backward(dy: Tensor, args: ScanArguments, checkpoints: Tensor, level: int = -1) -> tuple[Tensor | None, ...]:
    """Gradients of x, dt, k, q, z, A, D and dt_bias; None for those absent."""
    call = _scan_call(args)
    parameters = zip(("dA", "dD", "ddt_bias"), args[5:8])
    outputs = *call.backward_outputs(dy, checkpoints), *(call.gradient(name, p) for name, p in parameters)
    add_up(call, args.z is not None)
    run(library.vl_scan_backward, call.struct, level)
    return call.gradients(outputs)


def matmul(a: Tensor, b: Tensor, level: int = -1) -> Tensor:
    """a b for float32 matrices (rows, depth) and (depth, columns), not empty, each contiguous along one dimension.

    Every sum is taken in the order of the depth: it depends on neither the number of threads nor the other rows.
    """
    (rows, depth), columns = a.shape, b.shape[1]
    out = a.new_empty(rows, columns)
    pointers, strides = (a.data_ptr(), b.data_ptr()), (*_strides(a), *_strides(b))
    struct = Matmul(rows, columns, depth, torch.get_num_threads(), *pointers, *strides, None, out.data_ptr())
    run(library.vl_matmul, struct, level)
    return out


def _strides(t: Tensor) -> tuple[int, int]:
    """Of a matrix; that of a single column says nothing, and torch sets it at will."""
    row, column = t.stride()
    return row, 1 if t.shape[1] == 1 else column


def _scan_call(args: ScanArguments) -> ScanCall:
    call = ScanCall(args, args.x.dtype, CHUNK, LANES)
    share(call, jobs=args.x.shape[1], channels=args.x.shape[3])
    return call


def add_up(call: Call, meet: bool, results: int = 1) -> None:
    """Room for float32 sums of what directions add to so many results side by side, where those are of a shorter type."""
    s = call.struct
    if meet and s.groups > 1 and call.dtype != call.real:
        call.output("sums", (s.batch, s.length, results * s.channels), call.real)


def share(call: Call, jobs: int, channels: int) -> None:
    """Sequences share the work; where they are too few to keep the threads evenly busy, so do parts of the channels: as few
    as will do, for each part adds up gradients of keys and queries for itself."""
    threads = torch.get_num_threads()
    lanes = LANES // 2 if call.dtype == torch.float64 else LANES
    call.struct.threads, call.struct.parts = threads, parts_of(jobs, channels, lanes, threads)


def parts_of(jobs: int, channels: int, lanes: int, threads: int) -> int:
    """Of the channels of a sequence; see `share`."""
    wanted = 1 if jobs >= 4 * threads else threads // math.gcd(jobs, threads)
    return max(1, min(wanted, -(-channels // lanes)))


def run(function, struct: ctypes.Structure, level: int, *options: int) -> None:
    if function(ctypes.byref(struct), *options, level):
        raise RuntimeError(f"the CPU kernel could not run: out of memory, or level {level} is not among {levels()}")
