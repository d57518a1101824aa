"""The compiled kernels of `kernels/` for NVIDIA GPUs: opens their library and queues them on torch's stream.

Float64 has no kernel; more than 16 states run in float32, which activations are converted to on the way. Only scans of 16
states are split over time (see `segments`).
"""

from __future__ import annotations

import ctypes
import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from ..validate import ScanArguments
from . import splits as segments
from .bindings import Input, ScanCall, Split, open_library

NAME = "cuda"
CHUNK = 8  # steps between two saved states
LANES = 64  # channels of a saved state are padded to the tile of a warp
NATIVE_STATES = 16  # up to here kernels exist for every dtype
SPLIT_STATES = 16  # VL_SPLIT_STATES of kernels/scan.h
RESIDENT = 8  # warps that a multiprocessor runs at once: more have no registers in backward
MAX_DIRECTIONS = 64
MAX_STRIDE = 2**31 - 1
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@functools.cache
def _open() -> tuple[ctypes.CDLL | None, str | None]:
    """The library, or None and the reason why it cannot be had."""
    library, reason = open_library(NAME, "nvcc")
    if library is None:
        return None, reason
    return declare(library), None


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Tells ctypes the types that are not int."""
    library.vl_cuda_error.restype = ctypes.c_char_p
    library.vl_cuda_parts.restype = ctypes.c_int64
    for function in (library.vl_cuda_scan_forward, library.vl_cuda_scan_backward):
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    return library


def unavailable(device_type: str, dtype: torch.dtype = torch.float32) -> str | None:
    """Why the library cannot run on that device type and dtype, or None if it can."""
    if device_type != "cuda":
        return "runs on CUDA devices alone"
    if dtype not in DTYPES:
        return f"takes {', '.join(map(str, DTYPES))}, not {dtype}"
    return _unavailable_on(torch.cuda.current_device() if torch.cuda.is_available() else -1)


@functools.cache
def _unavailable_on(device: int) -> str | None:
    if torch.version.hip is not None:
        return "runs on NVIDIA devices alone"
    library, reason = _open()
    if library is None:
        return reason
    if device < 0:
        return "torch sees no CUDA device"
    error = library.vl_cuda_check(device)
    return f"the library does not run here: {library.vl_cuda_error(error).decode()}" if error else None


def forward(args: ScanArguments, save: bool) -> tuple[Tensor, Tensor]:
    """The scan, and the states before every CHUNK-th step if `save` (in the kernel's own layout)."""
    if args.x.shape[-1] % 2:
        y, checkpoints = forward(_even(args), save)
        return y[..., :-1].contiguous(), checkpoints
    call = _CudaCall(args)
    y, checkpoints = call.forward_outputs(save)
    call.run(_open()[0].vl_cuda_scan_forward, meet=args.reduce == "mean")
    return y.to(args.x.dtype), checkpoints


def backward(dy: Tensor, args: ScanArguments, checkpoints: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of x, dt, k, q, z, A, D and dt_bias; None for those absent."""
    inputs = (args.x, args.dt, args.k, args.q, args.z, args.A, args.D, args.dt_bias)
    if args.x.numel() == 0:
        return tuple(None if t is None else torch.zeros_like(t) for t in inputs)
    if args.x.shape[-1] % 2:
        grads = backward(F.pad(dy, (0, 1)), _even(args), checkpoints)
        return tuple(None if t is None else g[tuple(map(slice, t.shape))].contiguous() for g, t in zip(grads, inputs))
    call = _CudaCall(args)
    call.struct.parts = _open()[0].vl_cuda_parts(ctypes.byref(call.struct))
    rows, parameters = call.struct.batch * call.split.segments, zip(("dA", "dD", "ddt_bias"), args[5:8])
    outputs = (
        *call.backward_outputs(dy, checkpoints),
        *(None if p is None else call.output(name, (rows, *p.shape), torch.float32) for name, p in parameters),
    )
    call.run(_open()[0].vl_cuda_scan_backward, meet=args.z is not None)
    return call.gradients(outputs)


def _even(args: ScanArguments) -> ScanArguments:
    """One more channel of zeros: the kernels read channels in pairs."""
    wider = {n: F.pad(t, (0, 1)) for n, t in args.tensors().items() if n in ("x", "dt", "z", "D", "dt_bias")}
    if args.A is not None:
        wider["A"] = F.pad(args.A, (0, 0, 0, 1))
    return args._replace(**wider)


class _CudaCall(ScanCall):
    def __init__(self, args: ScanArguments):
        if args.x.dtype not in DTYPES:
            raise TypeError(f"scan: the CUDA kernels take {', '.join(map(str, DTYPES))}, not {args.x.dtype}")
        if len(args.reverse) > MAX_DIRECTIONS:
            raise ValueError(f"scan: the CUDA kernels take up to {MAX_DIRECTIONS} directions, not {len(args.reverse)}")
        self.pairs = args.x.shape[-1]
        dtype = args.x.dtype if args.k.shape[-1] <= NATIVE_STATES else torch.float32
        super().__init__(args, dtype, CHUNK, LANES)
        machine = segments.Machine(segments.processors(self.device) * RESIDENT, channels=LANES, teams=2)
        splits = args.k.shape[-1] == SPLIT_STATES
        self.split = segments.split(args, machine, CHUNK) if splits else segments.Split(None, 1)

    def input(self, t: Tensor | None) -> Input:
        """Activations of channels that do not begin on pairs are copied."""
        if t is not None and t.shape[-1] == self.pairs:
            if t.data_ptr() % (2 * t.element_size()) or any(stride % 2 for stride in t.stride()[:-1]):
                t = t.clone(memory_format=torch.contiguous_format)
        found = super().input(t)
        if found.step > MAX_STRIDE:
            raise ValueError(f"scan: tokens lie {found.step} elements apart, the CUDA kernels take up to {MAX_STRIDE}")
        return found

    def run(self, function, meet: bool) -> None:
        """Queues a kernel; `meet`: whether its directions add to one result."""
        if self.args.x.numel() == 0:
            return
        if meet and self.struct.groups > 1:
            self.output("sums", self.args.x.shape[1:], torch.float32)
        split = Split(span=self.split.span or 0)
        if self.split.span:
            G, B, _, N, width = self.checkpoint_shape
            runs = 1 + segments.probes(self.args.rule, N)
            self.output("summaries", (G, B, self.split.segments, runs, N, width), torch.float32, split)
            self.output("starts", (G, B, self.split.segments, N, width), torch.float32, split)
        error = _queue(function, self.struct, split, self.device)
        if error:
            raise RuntimeError(f"scan: the CUDA kernel could not run: {_open()[0].vl_cuda_error(error).decode()}")


def _queue(function, struct: ctypes.Structure, split: Split, device: torch.device) -> int:
    with torch.cuda.device(device):
        return function(
            ctypes.byref(struct), ctypes.byref(split), device.index, torch.cuda.current_stream(device).cuda_stream
        )
