"""The Triton backend: for NVIDIA GPUs without compiled CUDA kernels, and for AMD GPUs.

Triton is imported by the first scan, not with the package. With TRITON_INTERPRET=1 it runs on the CPU, for tests.
"""

import functools
import importlib.util
import os
from collections import namedtuple
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...arguments import MambaInnerArguments, ScanArguments, named_tensors
from ...rules import RULES, kernel_state_dtype

NAME = "triton"
STATE_EVERY = 8  # steps between two saved states, N numbers a channel each
CHUNK = 16  # tokens that a scan with heads takes at once
PROGRAMS = 2048  # of one warp, that keep a large GPU busy: a scan in chunks with fewer is split over time
MIN_CHUNKS = 8  # of a segment
LANES = 32  # channels of a saved state are padded to a multiple of this, the widest block of a program
HELD = {"longhorn": 4, "longhorn_exact": 4, "mamba": 3}  # states that backward holds in registers: more would spill
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_DIRECTIONS = 62  # their flags are bits of one integer
MAX_BLOCKS = 2**16 - 1  # of channels, which are on the second axis of a grid
OPTIONS = {"num_warps": 1, "num_stages": 2, "enable_fp_fusion": True}
MAX_ELEMENTS = 2**31 - 1  # of one sequence, within which offsets have 32 bits


def unavailable(device: str | torch.device, dtype: torch.dtype = torch.float32) -> str | None:
    """Why Triton cannot run on that device and dtype, or None if it can."""
    device = torch.device(device)
    if dtype not in DTYPES:
        return f"takes {', '.join(map(str, DTYPES))}, not {dtype}: it computes in float32"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return _no_gpu(device.index) if device.type == "cuda" else "runs on GPUs only (device type 'cuda')"


@functools.cache
def _no_gpu(device: int | None) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not torch.cuda.is_available():
        return "torch finds no GPU"
    if torch.version.hip is None and (found := torch.cuda.get_device_capability(device)) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} has compute capability {found[0]}.{found[1]}, 8.0 is needed"
    return None


# Arguments of the kernels
Inputs = namedtuple("Inputs", "x dt k q z dy D dt_bias")  # tensors, None if absent, or all their strides but the last
Outputs = namedtuple("Outputs", "x dt k q z z_strides D dt_bias sums")  # gradients, memory for sums over directions
# First and last state, in backward the gradient of the last and of the first; maps of segments (see `chunks`).
Ends = namedtuple("Ends", "given result maps", defaults=(None,))
Sums = namedtuple("Sums", "k q dt")  # what `sum_shares` writes, or its strides
SumConfig = namedtuple("SumConfig", "CHUNK N PADDED")
ChunkConfig = namedtuple("ChunkConfig", "BLOCK N PADDED PRECISION")
Config = namedtuple("Config", "RULE DIRECTIONS MEAN STATE_EVERY HELD N TILE")


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
    """The tile for N states: 32 lanes, each with up to 16 numbers."""
    padded = 1 << (states - 1).bit_length()
    lanes = min(4, padded)  # to a channel: balances the shuffles that sum over states and over channels
    held = padded // lanes
    return Tile(held, min(lanes, max(1, 16 // held)), lanes, 32 // lanes)


def empty_states(args: ScanArguments | MambaInnerArguments, save: bool) -> Tensor:
    """Memory for the saved states; see `Backend`."""
    (G, B, L, D, N, *_, H), like = args.sizes, args[0]
    if H != D:  # in front of the states, what `chunks_prepare` writes
        numbers = G * B * -(-L // CHUNK) * ((CHUNK + (CHUNK + 2) * H) * CHUNK + N * D)
        return like.new_empty(numbers if save else 0, dtype=torch.float32)
    return args.sizes.empty_states(like, STATE_EVERY, LANES, kernel_state_dtype(like.dtype, args.rule), save)


def segment_chunks(programs: int, chunks: int) -> int:
    """Chunks of a segment, of which the scan starts `programs` each; all chunks if it is not worth splitting it.

    A split scan runs through all chunks nearly twice, so it takes at least three segments to be faster.
    """
    segments = min(PROGRAMS // max(programs, 1), chunks // MIN_CHUNKS)
    return -(-chunks // segments) if segments > 2 else max(chunks, 1)


def forward(args: ScanArguments, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Runs a scan, in chunks if it has heads; see `Backend`."""
    launch, saved_states = _Launch(args), empty_states(args, save)
    y, state = args.new_outputs()
    given, result = args.initial_state, state if args.return_state else None
    ends = Ends(None if given is None else given.contiguous(), result)
    if args.has_heads:
        from .chunks import chunks_forward, chunks_prepare

        prepared = saved_states if save else launch.empty(launch.prepared)
        (L, *_, reverse, config), (G, B, *_, H) = launch.arguments, args.sizes
        launch.run(chunks_prepare, (B * -(-L // CHUNK), H, G), *launch.inputs, prepared, L, reverse, config)
        launch.in_segments(chunks_forward, ends, prepared, saved_states[launch.prepared :] if save else None, y)
    else:
        from .kernels import scan_forward

        sums, states = launch.sums_for(y), saved_states if save else None
        launch.run(scan_forward, launch.grid, *launch.inputs, ends, launch.A, y, sums, states, *launch.arguments)
    return y, state, saved_states


def backward(
    dy: Tensor, dstate: Tensor | None, args: ScanArguments, saved_states: Tensor, out: Mapping[str, Tensor] = {}
) -> tuple[Tensor | None, ...]:
    """Gradients of a scan; see `Backend`. `out` is as in `cuda.backward`."""
    from .tiles import sum_shares

    launch, (G, B, L, D, N, *_, H) = _Launch(args, dy), args.sizes
    dx, ddt = args.x.new_empty(args.x.shape), args.dt.new_empty(args.dt.shape)
    keys, steps = launch.empty(launch.blocks, G, B, L, 2 * N), None  # each program's share of dk and dq, and of ddt
    dinitial = None if args.initial_state is None else launch.empty(G, B, N, D)
    ends = Ends(None if dstate is None else dstate.contiguous(), dinitial)
    dz, dz_strides, sums = None, (0, 0, 0), None
    if args.z is not None:
        one = args.reduce == "mean" or G == 1  # gradient of z; else one for each direction, added here
        dz = launch.empty(G, B, L, D) if not one else out["z"] if "z" in out else args.z.new_empty(B, L, D)
        dz_strides = dz.expand(G, B, L, D).stride()[:-1]
        sums = launch.sums_for(dz)
    if args.has_heads:
        from .chunks import chunks_backward

        steps, dD, dA = launch.empty(launch.blocks, G, B, L), launch.empty(B * launch.segments, G, D), None
        outputs = Outputs(dx, steps, *keys.chunk(2, -1), dz, dz_strides, None if args.D is None else dD, None, None)
        launch.in_segments(chunks_backward, ends, saved_states, saved_states[launch.prepared :], outputs)
        dD, ddt_bias = dD.sum(0), steps.view(H, launch.blocks // H, G, B * L).sum((1, 3)).T
    else:
        from .kernels import scan_backward

        blocks, width = launch.blocks, launch.tile.channels
        dA = None if args.A is None else launch.empty(B, G, blocks, N, width)
        dD, ddt_bias = (None if t is None else launch.empty(B, G, blocks * width) for t in (args.D, args.dt_bias))
        outputs = Outputs(dx, ddt, *keys.chunk(2, -1), dz, dz_strides, dD, ddt_bias, sums)
        results = (ends, launch.A, saved_states, dA, outputs)
        launch.run(scan_backward, launch.grid, *launch.inputs, *results, *launch.arguments)
        dA = None if dA is None else dA.sum(0).transpose(2, 3).flatten(1, 2)[:, :D]
        dD, ddt_bias = (None if t is None else t.sum(0)[:, :D] for t in (dD, ddt_bias))
    dk, dq = (out[name] if name in out else t.new_empty(t.shape) for name, t in (("k", args.k), ("q", args.q)))
    written = Sums(dk, dq, ddt)
    strides = Sums(*(t.stride()[:-1] for t in written))
    config, grid = SumConfig(CHUNK, N, 1 << (N - 1).bit_length()), (B * -(-L // CHUNK), G)
    launch.run(sum_shares, grid, keys, steps, written, strides, L, launch.blocks, launch.blocks // H, config)
    grads = (dx, ddt, dk, dq, dz.sum(0) if dz is not None and dz.dim() == 4 else dz, dA, dD, ddt_bias, dinitial)
    pairs = zip(named_tensors(args).items(), grads)
    return tuple(None if t is None else g if name in out else g.to(t.dtype).contiguous() for (name, t), g in pairs)


class _Launch:
    """Runs a kernel with its inputs, and allocates its results; `dy` is given for backward."""

    def __init__(self, args: ScanArguments, dy: Tensor | None = None):
        if len(args.reverse) > MAX_DIRECTIONS:
            raise ValueError(f"scan: {len(args.reverse)} directions, backend {NAME!r} runs at most {MAX_DIRECTIONS}")
        (G, B, L, D, N, *_, H), self.args = args.sizes, args
        if L * max(D, N) > MAX_ELEMENTS:
            raise ValueError(f"scan: {L} tokens of {max(D, N)} numbers, backend {NAME!r} takes up to {MAX_ELEMENTS}")
        activations = (args.x, args.dt, args.k, args.q, args.z, dy)
        rows = (None if t is None else _rows(t).expand(G, B, L, -1) for t in activations)
        inputs = Inputs(*rows, *(None if t is None else _rows(t) for t in (args.D, args.dt_bias)))
        strides = Inputs(*((0, 0, 0) if t is None else t.stride()[:-1] for t in inputs))
        self.inputs = (inputs, strides)
        reverse = sum(flag << g for g, flag in enumerate(args.reverse))
        if args.has_heads:
            # With bfloat16 x, factors of products are rounded to TF32. Else a product is three of TF32, as exact as
            # float32, and needs more registers.
            block, precision = (32, "tf32") if args.x.dtype == torch.bfloat16 else (16, "tf32x3")
            precision = "ieee" if torch.version.hip else precision
            padded, chunks = max(16, 1 << (N - 1).bit_length()), -(-L // CHUNK)
            self.blocks = H * -(-(D // H) // block)
            self.turns = segment_chunks(B * self.blocks * G, chunks)
            self.segments = max(1, -(-chunks // self.turns))
            self.prepared = G * B * chunks * (CHUNK + (CHUNK + 2) * H) * CHUNK  # numbers
            scalars = (L, D // H, D, reverse)
            config: Any = ChunkConfig(block, N, padded, precision)
        else:
            self.tile, mean = tile_of(N), args.reduce == "mean"
            self.blocks, self.A = -(-D // self.tile.channels), None
            if args.A is not None:  # (G, blocks, N, channels of a block), float32
                padding = (0, 0, 0, self.blocks * self.tile.channels - D)
                self.A = F.pad(args.A.float(), padding).unflatten(1, (self.blocks, -1)).mT.contiguous()
            self.grid, scalars = (B, self.blocks, 1 if mean else G), (D, L, reverse)  # mean: all directions in turn
            config = Config(RULES[args.rule].number, G, mean, STATE_EVERY, HELD[args.rule], N, self.tile)
        if self.blocks > MAX_BLOCKS:
            raise ValueError(f"scan: {D} channels in {self.blocks} blocks, backend {NAME!r} runs at most {MAX_BLOCKS}")
        self.arguments = (*scalars, config)

    def in_segments(self, kernel: Any, ends: Ends, prepared: Tensor, states: Tensor | None, results: Any) -> None:
        """Runs a kernel of `chunks`, first for the maps of all segments but the last, if there are several."""
        (G, B, _, D, N, *_, H), (*scalars, config) = self.args.sizes, self.arguments

        def run(segments: int, blocks: int, ends: Ends, *results: Any) -> None:
            arguments = (*self.inputs, ends, prepared, *results, *scalars, segments, self.turns, config)
            self.run(kernel, (B * segments, blocks, G), *arguments)

        if self.segments > 1:
            ends = ends._replace(maps=self.empty(G, B, self.segments - 1, N, D + H * N))
            run(self.segments - 1, self.blocks + H * -(-N // config.BLOCK), Ends(None, ends.maps), None, None)
        run(self.segments, self.blocks, ends, states, results)

    def run(self, kernel: Any, grid: tuple[int, ...], *arguments: Any) -> None:
        with torch.cuda.device_of(self.args.x):
            kernel[grid](*arguments, **OPTIONS)

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.args.x.device)

    def sums_for(self, output: Tensor) -> Tensor | None:
        """Memory for the float32 sum over directions with reduce="mean": `output` itself if it is float32."""
        if self.args.reduce == "none" or len(self.args.reverse) == 1:
            return None
        return output if output.dtype == torch.float32 else self.empty(*output.shape)


def _rows(t: Tensor) -> Tensor:
    """A tensor whose last stride is 1 and whose rows lie within MAX_ELEMENTS, copied only if necessary."""
    is_near = t.shape[-2] * t.stride(-2) + t.shape[-1] <= MAX_ELEMENTS
    return t if t.stride(-1) == 1 and is_near else t.contiguous()
