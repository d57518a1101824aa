"""The Triton backend: for NVIDIA GPUs without compiled CUDA kernels, and for AMD GPUs.

Triton is imported by the first scan, not with the package. With TRITON_INTERPRET=1 it runs on the CPU, for tests.
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
from .. import splits

NAME = "triton"
CHUNK = 8  # steps between two saved states: they cost 4 N / CHUNK bytes a token and channel
LANES = 32  # channels of a saved state are padded to a multiple of this, the widest block of a program
HELD = {"longhorn": 4, "longhorn_exact": 4, "mamba": 3}  # states that backward holds in registers: more would spill
HELD_SPLIT = HELD | {"mamba": 2}  # with a split over time, which needs registers for the start of a segment
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_DIRECTIONS = 62  # their flags are bits of one integer
OPTIONS = {"num_warps": 1, "enable_fp_fusion": True}
RESIDENT_WARPS = 8  # of a multiprocessor, each a program: registers allow no more in backward
INDEX_LIMIT = 2**31  # elements of one sequence; from here on offsets have 64 bits


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
    """Shape of a state tile (see `tiles`): states and channels in registers, states and channels over lanes."""

    SR: int
    CR: int
    SL: int
    CL: int

    @property
    def channels(self) -> int:
        """Of a block."""
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
    """Runs a scan; see `Backend`. With a split, the steps between checkpoints are counted in each segment."""
    from .forward_kernel import scan_forward

    params = _Params(args)
    y = torch.empty(args.output_shape, dtype=args.x.dtype, device=args.x.device)
    checkpoints = params.empty(args.sizes.num_checkpoints(CHUNK, LANES) if save else 0)
    sums, saved, starts = params.sums_for(y), checkpoints if save else None, params.starts()
    params.launch(scan_forward, params.scans, params.inputs, y, sums, saved, starts, CHUNK=CHUNK)
    return y, checkpoints


def backward(dy: Tensor, args: ScanArguments, checkpoints: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of a scan; see `Backend`."""
    from .backward_kernel import scan_backward

    params = _Params(args)
    G, B, L, D = args.x.shape
    N = args.k.shape[-1]
    dx, ddt = (torch.empty(args.x.shape, dtype=args.x.dtype, device=args.x.device) for _ in range(2))
    dk, dq = (params.empty(params.blocks, G, B, L, N) for _ in range(2))
    dz = sums = None
    if args.z is not None and args.reduce == "mean":
        dz = torch.empty((B, L, D), dtype=args.x.dtype, device=args.x.device)
        sums = params.sums_for(dz)
    elif args.z is not None:
        dz = params.empty(G, B, L, D)
    rows, width = B * params.split.num_segments, params.tile.channels
    dA = None if args.A is None else params.empty(rows, G, params.blocks, N, width)
    dD, ddt_bias = (None if t is None else params.empty(rows, G, params.blocks * width) for t in args[6:8])
    dy = _rows(dy.expand(args.x.shape) if args.reduce == "mean" else dy)
    outputs = (dx, ddt, dk, dq, dz, dA, dD, ddt_bias)
    held = (HELD if params.split.steps is None else HELD_SPLIT)[args.rule]
    tensors = (checkpoints, sums, params.starts(dy), *outputs)
    params.launch(scan_backward, params.scans, [*params.inputs, dy], *tensors, CHUNK=CHUNK, HELD=held)

    dk, dq = dk.sum(0), dq.sum(0)
    dz = dz.sum(0) if dz is not None and args.reduce == "none" else dz
    dA = None if dA is None else dA.sum(0).transpose(2, 3).flatten(1, 2)[:, :D]
    dD, ddt_bias = (None if t is None else t.sum(0)[:, :D] for t in (dD, ddt_bias))
    grads = (dx, ddt, dk, dq, dz, dA, dD, ddt_bias)
    return tuple(None if g is None else g.to(t.dtype).contiguous() for g, t in zip(grads, args[:8]))


class _Params:
    """The arguments that the kernels share."""

    def __init__(self, args: ScanArguments):
        if len(args.reverse) > MAX_DIRECTIONS:
            raise ValueError(f"scan: {len(args.reverse)} directions, backend {NAME!r} runs at most {MAX_DIRECTIONS}")
        self.args, self.tile, channels = args, tile_of(args.k.shape[-1]), args.x.shape[-1]
        self.blocks = -(-channels // self.tile.channels)
        self.inputs = [None if t is None else _rows(t) for t in args[:5]]
        A = None if args.A is None else self.tiles(args.A)
        self.parameters = [A, *(None if t is None else t.contiguous() for t in (args.D, args.dt_bias))]
        self.flags = sum(1 << g for g, flag in enumerate(args.reverse) if flag)
        self.scans = 1 if args.reduce == "mean" else len(args.reverse)  # programs that share a block and segment
        device = splits.Device(splits.multiprocessors(args.x.device) * RESIDENT_WARPS, self.tile.channels)
        self.split = splits.split(args, device, CHUNK)

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.args.x.device)

    def tiles(self, A: Tensor) -> Tensor:
        """(G, D, N) as (G, blocks, N, channels of a block), float32."""
        padding = self.blocks * self.tile.channels - A.shape[1]
        return F.pad(A.float(), (0, 0, 0, padding)).unflatten(1, (self.blocks, self.tile.channels)).mT.contiguous()

    def sums_for(self, output: Tensor) -> Tensor | None:
        """Memory for the float32 sum over directions with reduce="mean": `output` itself if it is float32."""
        if self.args.reduce == "none" or len(self.args.reverse) == 1:
            return None
        return output if output.dtype == torch.float32 else self.empty(*output.shape)

    def starts(self, dy: Tensor | None = None) -> Tensor | None:
        """The state that each segment starts with, or with dy its gradient; None without a split."""
        if self.split.steps is None:
            return None
        from .split_kernels import scan_join, scan_summary

        G, B, _, N = self.args.k.shape
        runs = 1 + splits.basis_runs(self.args.rule, N)
        summaries = self.empty(G, B, self.split.num_segments, runs, self.blocks, N, self.tile.channels)
        starts = self.empty(G, B, self.split.num_segments, self.blocks, N, self.tile.channels)
        self.launch(scan_summary, G * runs, [*self.inputs, dy], summaries)
        sizes = (B, self.split.num_segments, self.args.x.shape[-1])
        constants = dict(RULE=RULES.index(self.args.rule), GRADIENT=dy is not None, N=N, **self.tile._asdict())
        with torch.cuda.device_of(starts):
            scan_join[(B, self.blocks, G)](summaries, starts, *sizes, self.flags, **constants, **OPTIONS)
        return starts

    def launch(self, kernel, depth: int, inputs: list[Tensor | None], *tensors: Tensor | None, **constants) -> None:
        """Runs a kernel with `depth` programs for each block of channels of each segment."""
        import triton.language as tl

        args = self.args
        G, B, L, D = args.x.shape
        strides = [(0, 0, 0) if t is None else t.stride()[:-1] for t in inputs]
        reach = max(L * s[-1] for s in strides) + D  # a row of the largest input, counted within one sequence
        index = tl.int32 if max(reach, L * D) < INDEX_LIMIT else tl.int64
        tensors = (*inputs[:5], *self.parameters, *inputs[5:], *tensors)
        scalars = (*strides, B, L, D, self.flags, self.split.steps)
        constants |= dict(RULE=RULES.index(args.rule), DIRECTIONS=G, MEAN=args.reduce == "mean", INDEX=index)
        constants |= dict(N=args.k.shape[-1], **self.tile._asdict())
        with torch.cuda.device_of(args.x):
            kernel[(B * self.split.num_segments, self.blocks, depth)](*tensors, *scalars, **constants, **OPTIONS)


def _rows(t: Tensor) -> Tensor:
    """A tensor whose last stride is 1, copied only if necessary."""
    return t if t.stride(-1) == 1 else t.contiguous()
