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

from ...validate import RULES, ScanArguments
from .. import splits as segments

NAME = "triton"
CHUNK = 8  # steps between two saved states: they cost 4 N / CHUNK bytes a token and channel
LANES = 32  # channels of a saved state are padded to a multiple of this, the widest block of a program
HELD = {"longhorn": 4, "longhorn_exact": 4, "mamba": 3}  # states that backward keeps in registers: more would spill
HELD_SPLIT = HELD | {"mamba": 2}  # of a scan that is split over time: where a segment begins takes registers too
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_DIRECTIONS = 62  # their flags are the bits of one integer
OPTIONS = {"num_warps": 1, "enable_fp_fusion": True}
RESIDENT = 8  # programs (warps) that a multiprocessor runs at once: more have no registers in backward
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
    """Shape of a state tile in `triton_tiles`: states and channels in registers, states and channels over lanes."""

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


def forward(args: ScanArguments, save: bool) -> tuple[Tensor, Tensor]:
    """The scan, and the states before every CHUNK-th step if `save`, (G, B, ceil(L / CHUNK), N, D padded to LANES).

    In a scan that is split, the steps are counted in each segment.
    """
    from .forward import scan_forward

    call = _Call(args)
    G, B, L, D = args.x.shape
    y = torch.empty(args.output_shape, dtype=args.x.dtype, device=args.x.device)
    checkpoints = call.empty(G * B * -(-L // CHUNK) * args.k.shape[-1] * call.width) if save else call.empty(0)
    sums, saved, starts = call.sums_for(y), checkpoints if save else None, call.starts()
    call.launch(scan_forward, call.scans, call.inputs, y, sums, saved, starts, CHUNK=CHUNK)
    return y, checkpoints


def backward(dy: Tensor, args: ScanArguments, checkpoints: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of x, dt, k, q, z, A, D and dt_bias; None for those absent."""
    from .backward import scan_backward

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
    rows = B * call.split.segments
    dA = None if args.A is None else call.empty(rows, G, call.blocks, N, call.tile.channels)
    padded = call.blocks * call.tile.channels
    dD = None if args.D is None else call.empty(rows, G, padded)
    ddt_bias = None if args.dt_bias is None else call.empty(rows, G, padded)
    dy = _rows(dy.expand(args.x.shape) if args.reduce == "mean" else dy)
    outputs = (dx, ddt, dk, dq, dz, dA, dD, ddt_bias)
    call.launch(
        scan_backward,
        call.scans,
        [*call.inputs, dy],
        checkpoints,
        sums,
        call.starts(dy),
        *outputs,
        CHUNK=CHUNK,
        HELD=(HELD if call.split.span is None else HELD_SPLIT)[args.rule],
    )

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
        width = args.x.shape[-1]
        self.blocks = -(-width // self.tile.channels)
        self.width = -(-width // LANES) * LANES
        self.inputs = [None if t is None else _rows(t) for t in (args.x, args.dt, args.k, args.q, args.z)]
        A = None if args.A is None else self.tiles(args.A)
        self.parameters = [A, *(None if t is None else t.contiguous() for t in (args.D, args.dt_bias))]
        self.flags = sum(1 << g for g, flag in enumerate(args.reverse) if flag)
        self.scans = 1 if args.reduce == "mean" else len(args.reverse)  # programs that share a block and segment
        machine = segments.Machine(segments.processors(args.x.device) * RESIDENT, self.tile.channels)
        self.split = segments.split(args, machine, CHUNK)

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

    def starts(self, dy: Tensor | None = None) -> Tensor | None:
        """The state that each segment begins with, or with dy its gradient; None without a split."""
        if self.split.span is None:
            return None
        from .split import scan_join, scan_summary

        G, B, _, N = self.args.k.shape
        runs = 1 + segments.probes(self.args.rule, N)
        summaries = self.empty(G, B, self.split.segments, runs, self.blocks, N, self.tile.channels)
        starts = self.empty(G, B, self.split.segments, self.blocks, N, self.tile.channels)
        self.launch(scan_summary, G * runs, [*self.inputs, dy], summaries)
        with torch.cuda.device_of(starts):
            scan_join[(B, self.blocks, G)](
                summaries,
                starts,
                B,
                self.split.segments,
                self.args.x.shape[-1],
                self.flags,
                RULE=RULES.index(self.args.rule),
                GRADIENT=dy is not None,
                N=N,
                **self.tile._asdict(),
                **OPTIONS,
            )
        return starts

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
        with torch.cuda.device_of(args.x):
            kernel[(B * self.split.segments, self.blocks, depth)](
                *inputs[:5],
                *self.parameters,
                *inputs[5:],
                *tensors,
                *strides,
                B,
                L,
                D,
                self.flags,
                self.split.span,
                RULE=RULES.index(args.rule),
                GROUPS=G,
                MEAN=args.reduce == "mean",
                INDEX=index,
                N=args.k.shape[-1],
                **constants,
                **self.tile._asdict(),
                **OPTIONS,
            )


def _rows(t: Tensor) -> Tensor:
    """A tensor that the kernels can read: copied only where its last stride is not 1."""
    return t if t.stride(-1) == 1 else t.contiguous()
