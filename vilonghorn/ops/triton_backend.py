"""Launches the Triton kernels: the backend for GPUs without compiled CUDA kernels, and for AMD's.

Triton is imported with the first scan, not with the package. With TRITON_INTERPRET=1 it runs on the CPU, for tests.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .arguments import RULES, ScanArguments

NAME = "triton"
CHUNK = 8  # steps between two saved states: they cost 4 N / CHUNK bytes a token and channel
LANES = 32  # channels of a saved state are padded to a multiple of this, the widest block of a program
HELD = {"longhorn": 4, "longhorn_exact": 4, "mamba": 3}  # states that backward keeps in registers: more would spill
HELD_SPLIT = {rule: held - 1 for rule, held in HELD.items()}  # a split scan needs a few registers for itself
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_DIRECTIONS = 62  # their flags are the bits of one integer
OPTIONS = {"num_warps": 1, "enable_fp_fusion": True}
MAX_SEGMENTS = 64
MIN_SEGMENT = 64  # tokens: below, starting a program costs more than it saves
RESIDENT = 8  # programs that a multiprocessor runs at once: more have no registers in backward
INDEX_LIMIT = 2**31  # elements of one sequence, above which the kernels count them in 64 bits


def unavailable(device_type: str, dtype: torch.dtype = torch.float32) -> str | None:
    """Why Triton cannot run on that device type and dtype, or None if it can."""
    if dtype not in DTYPES:
        return f"takes {', '.join(map(str, DTYPES))}, not {dtype}: it computes in float32"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return _no_gpu() if device_type == "cuda" else "runs on a GPU alone (device type 'cuda')"


@functools.cache
def _no_gpu() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not torch.cuda.is_available():
        return "torch finds no GPU"
    if torch.version.hip is None and torch.cuda.get_device_capability() < (8, 0):
        return "needs compute capability 8.0, which this GPU has not"
    return None


class Tile(NamedTuple):
    """Shape of a state tile in `triton_kernels`: states and channels in registers, states and channels over lanes."""

    SR: int
    CR: int
    SL: int
    CL: int

    @property
    def channels(self) -> int:
        return self.CR * self.CL


def tile_of(states: int) -> Tile:
    """The tile for N states: 32 lanes, each with up to 16 numbers.

    Four lanes to a channel balance the shuffles that sum over states against those that sum over channels.
    """
    padded = 1 << (states - 1).bit_length()
    lanes = min(4, padded)
    held = padded // lanes
    return Tile(held, min(lanes, max(1, 16 // held)), lanes, 32 // lanes)


def probes(rule: str, states: int) -> int:
    """Runs that find the linear part of a segment, besides the one over its tokens (see `triton_split`)."""
    return states if rule == "longhorn_exact" else 1


def segments(args: ScanArguments, processors: int) -> int:
    """Into how many segments a scan is split over time, so that a small batch fills the machine too.

    Time is counted in tokens that a program walks through, stretched where there are more programs than the machine
    holds. A split adds the summaries of its segments and a walk through them, and has to halve the time all the same.
    Longhorn's exact rule is split less than the others, for it needs N + 1 runs for a summary where they need 2.

    Args:
        args: the scan; its shapes, rule and reduction count.
        processors: multiprocessors of the device.

    Returns:
        1, for no split, or a power of two up to MAX_SEGMENTS.
    """
    G, B, L, D = args.x.shape
    runs = 1 + probes(args.rule, args.k.shape[-1])
    columns = B * -(-D // tile_of(args.k.shape[-1]).channels)  # programs of one direction and segment
    room = processors * RESIDENT
    scans, passes = (1, G) if args.reduce == "mean" else (G, 1)

    def tokens(count: int) -> float:
        scan = passes * max(1, count * columns * scans / room)
        summary = max(1, count * columns * G * runs / room) if count > 1 else 0
        return L / count * (scan + summary) + (count - 1) * runs * passes

    counts = [1]
    while counts[-1] < MAX_SEGMENTS and L >= 2 * counts[-1] * MIN_SEGMENT:
        counts.append(2 * counts[-1])
    best = min(counts, key=tokens)
    return best if tokens(best) <= tokens(1) / 2 else 1


def forward(args: ScanArguments, save: bool) -> tuple[Tensor, Tensor]:
    """The scan, and the states before every CHUNK-th step if `save`, (G, B, ceil(L / CHUNK), N, D padded to LANES).

    In a scan that is split, the steps are counted in each segment.
    """
    from .triton_kernels import scan_forward

    call = _Call(args)
    G, B, L, D = args.x.shape
    y = torch.empty(args.output_shape, dtype=args.x.dtype, device=args.x.device)
    checkpoints = call.empty(G, B, -(-L // CHUNK), args.k.shape[-1], call.width) if save else call.empty(0)
    sums, saved, summaries = call.sums_for(y), checkpoints if save else None, call.summaries()
    call.launch(scan_forward, call.scans, call.inputs, y, sums, saved, summaries, CHUNK=CHUNK)
    return y, checkpoints


def backward(dy: Tensor, args: ScanArguments, checkpoints: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of x, dt, k, q, z, A, D and dt_bias; None for those absent."""
    from .triton_kernels import scan_backward

    call = _Call(args)
    G, B, L, D = args.x.shape
    N = args.k.shape[-1]
    dx, ddt = (torch.empty(args.x.shape, dtype=args.x.dtype, device=args.x.device) for _ in range(2))
    dk, dq = (call.empty(call.blocks, G, B, L, N) for _ in range(2))
    dz = sums = None
    if args.z is not None and args.reduce == "mean":
        dz = torch.empty((B, L, D), dtype=args.x.dtype, device=args.x.device)
        sums = call.sums_for(dz)
    elif args.z is not None:
        dz = call.empty(G, B, L, D)
    rows = B * call.segments
    dA = None if args.A is None else call.empty(rows, G, call.blocks, N, call.tile.channels)
    padded = call.blocks * call.tile.channels
    dD = None if args.D is None else call.empty(rows, G, padded)
    ddt_bias = None if args.dt_bias is None else call.empty(rows, G, padded)
    dy = _rows(dy.expand(args.x.shape) if args.reduce == "mean" else dy)
    outputs = (dx, ddt, dk, dq, dz, dA, dD, ddt_bias)
    call.launch(
        scan_backward, call.scans, [*call.inputs, dy], checkpoints, sums, call.summaries(dy), *outputs,
        CHUNK=CHUNK, HELD=(HELD if call.span is None else HELD_SPLIT)[args.rule],
    )  # fmt: skip

    dk, dq = dk.sum(0), dq.sum(0)
    dz = dz.sum(0) if dz is not None and args.reduce == "none" else dz
    dA = None if dA is None else dA.sum(0).transpose(2, 3).flatten(1, 2)[:, :D]
    dD, ddt_bias = (None if t is None else t.sum(0)[:, :D] for t in (dD, ddt_bias))
    inputs = (args.x, args.dt, args.k, args.q, args.z, args.A, args.D, args.dt_bias)
    grads = (dx, ddt, dk, dq, dz, dA, dD, ddt_bias)
    return tuple(None if g is None else g.to(t.dtype).contiguous() for g, t in zip(grads, inputs))


class _Call:
    """The arguments that the kernels share, as they take them."""

    def __init__(self, args: ScanArguments):
        if len(args.reverse) > MAX_DIRECTIONS:
            raise ValueError(f"scan: {len(args.reverse)} directions, backend {NAME!r} runs at most {MAX_DIRECTIONS}")
        self.args, self.tile = args, tile_of(args.k.shape[-1])
        *_, length, width = args.x.shape
        self.blocks = -(-width // self.tile.channels)
        self.width = -(-width // LANES) * LANES
        self.inputs = [None if t is None else _rows(t) for t in (args.x, args.dt, args.k, args.q, args.z)]
        A = None if args.A is None else self.tiles(args.A)
        self.parameters = [A, *(None if t is None else t.contiguous() for t in (args.D, args.dt_bias))]
        self.scans = 1 if args.reduce == "mean" else len(args.reverse)  # programs that share a block and segment
        count = segments(args, _processors(args.x.device))
        self.span = None if count == 1 else -(-length // (count * CHUNK)) * CHUNK  # whole chunks in all but the last
        self.segments = 1 if self.span is None else -(-length // self.span)

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.args.x.device)

    def tiles(self, A: Tensor) -> Tensor:
        """(G, D, N) as (G, blocks, N, channels of a block), float32."""
        padding = self.blocks * self.tile.channels - A.shape[1]
        return F.pad(A.float(), (0, 0, 0, padding)).unflatten(1, (self.blocks, self.tile.channels)).mT.contiguous()

    def sums_for(self, output: Tensor) -> Tensor | None:
        """Where the sum over directions grows, under "mean": in `output` itself if that is float32."""
        if self.args.reduce == "none" or len(self.args.reverse) == 1:
            return None
        return output if output.dtype == torch.float32 else self.empty(*output.shape)

    def summaries(self, dy: Tensor | None = None) -> Tensor | None:
        """What the segments do to the state, or with dy to its gradient; None without a split."""
        if self.span is None:
            return None
        from .triton_split import scan_summary

        G, B, _, N = self.args.k.shape
        runs = 1 + probes(self.args.rule, N)
        summaries = self.empty(G, B, self.segments, runs, self.blocks, N, self.tile.channels)
        self.launch(scan_summary, G * runs, [*self.inputs, dy], summaries)
        return summaries

    def launch(
        self, kernel, depth: int, inputs: list[Tensor | None], *tensors: Tensor | None, **constants: int
    ) -> None:
        """Runs a kernel with `depth` programs for each block of channels of each segment."""
        import triton.language as tl

        args = self.args
        G, B, L, D = args.x.shape
        strides = [(0, 0, 0) if t is None else t.stride()[:-1] for t in inputs]
        reach = max(L * s[-1] for s in strides) + D  # a row of the largest input, counted within one sequence
        index = tl.int32 if max(reach, L * D) < INDEX_LIMIT else tl.int64
        flags = sum(1 << g for g, flag in enumerate(args.reverse) if flag)
        with torch.cuda.device_of(args.x):
            kernel[(B * self.segments, self.blocks, depth)](
                *inputs[:5], *self.parameters, *inputs[5:], *tensors, *strides, B, L, D, flags, self.span,
                RULE=RULES.index(args.rule), GROUPS=G, MEAN=args.reduce == "mean", INDEX=index, N=args.k.shape[-1],
                **constants, **self.tile._asdict(), **OPTIONS,
            )  # fmt: skip


def _rows(t: Tensor) -> Tensor:
    """A tensor that the kernels can read: copied only where its last stride is not 1."""
    return t if t.stride(-1) == 1 else t.contiguous()


def _processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; the interpreter, on a CPU, has one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
