"""The Triton backend: for NVIDIA GPUs without compiled CUDA kernels, and for AMD GPUs.

Triton is imported by the first scan, not with the package. With TRITON_INTERPRET=1 it runs on the CPU, for tests.
"""

import functools
import importlib.util
import os
from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...arguments import ChunkArguments, ScanArguments
from ...rules import RULES, kernel_state_dtype

NAME = "triton"
CHUNK = 8  # steps between two saved states, N numbers a channel each
LANES = 32  # channels of a saved state are padded to a multiple of this, the widest block of a program
HELD = {"longhorn": 4, "longhorn_exact": 4, "mamba": 3}  # states that backward holds in registers: more would spill
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_DIRECTIONS = 62  # their flags are bits of one integer
OPTIONS = {"num_warps": 1, "enable_fp_fusion": True}
CHUNK_TOKENS = 16  # tokens of a chunk of `scan_chunked`, a power of two
INDEX_LIMIT = 2**31  # elements of one sequence; from here on offsets have 64 bits


def unavailable(device_type: str, dtype: torch.dtype = torch.float32) -> str | None:
    """Why Triton cannot run on that device type and dtype, or None if it can."""
    if dtype not in DTYPES:
        return f"takes {', '.join(map(str, DTYPES))}, not {dtype}: it computes in float32"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return _no_gpu() if device_type == "cuda" else "runs on GPUs only (device type 'cuda')"


@functools.cache
def _no_gpu() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not torch.cuda.is_available():
        return "torch finds no GPU"
    if torch.version.hip is None and torch.cuda.get_device_capability() < (8, 0):
        return "needs a GPU of compute capability 8.0 or higher"
    return None


# Arguments of the kernels
Inputs = namedtuple("Inputs", "x dt k q z dy D dt_bias")  # tensors, None if absent, or all their strides but the last
Outputs = namedtuple("Outputs", "x dt k q z D dt_bias sums")  # gradients, and memory for sums over directions
Config = namedtuple("Config", "RULE DIRECTIONS MEAN CHUNK HELD INDEX N TILE")  # INDEX is the type of offsets


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


def empty_states(args: ScanArguments, save: bool) -> Tensor:
    """Memory for the saved states; see `Backend`."""
    return args.sizes.empty_states(args.x, CHUNK, LANES, kernel_state_dtype(args.x.dtype, args.rule), save)


def forward(args: ScanArguments, save: bool) -> tuple[Tensor, Tensor]:
    """Runs a scan; see `Backend`."""
    from .kernels import scan_forward

    params = _Params(args)
    y = torch.empty(args.output_shape, dtype=args.x.dtype, device=args.x.device)
    saved_states = empty_states(args, save)
    params.launch(scan_forward, y, params.sums_for(y), saved_states if save else None)
    return y, saved_states


def backward(dy: Tensor, args: ScanArguments, saved_states: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of a scan; see `Backend`."""
    from .kernels import scan_backward

    params = _Params(args, dy)
    G, B, L, D, N, *_ = args.sizes
    dx, ddt = (torch.empty(args.x.shape, dtype=args.x.dtype, device=args.x.device) for _ in range(2))
    dk, dq = (params.empty(params.blocks, G, B, L, N) for _ in range(2))
    dz = sums = None
    if args.z is not None and args.reduce == "mean":
        dz = torch.empty((B, L, D), dtype=args.x.dtype, device=args.x.device)
        sums = params.sums_for(dz)
    elif args.z is not None:
        dz = params.empty(G, B, L, D)
    width = params.tile.channels
    dA = None if args.A is None else params.empty(B, G, params.blocks, N, width)
    dD, ddt_bias = (None if t is None else params.empty(B, G, params.blocks * width) for t in args[6:8])
    params.launch(scan_backward, saved_states, dA, Outputs(dx, ddt, dk, dq, dz, dD, ddt_bias, sums))

    dk, dq = dk.sum(0), dq.sum(0)
    dz = dz.sum(0) if dz is not None and args.reduce == "none" else dz
    dA = None if dA is None else dA.sum(0).transpose(2, 3).flatten(1, 2)[:, :D]
    dD, ddt_bias = (None if t is None else t.sum(0)[:, :D] for t in (dD, ddt_bias))
    grads = (dx, ddt, dk, dq, dz, dA, dD, ddt_bias)
    return tuple(None if g is None else g.to(t.dtype).contiguous() for g, t in zip(grads, args[:8]))


# Fields in the order of `ChunkArguments`
ChunkInputs = namedtuple("ChunkInputs", "x dt k q D dt_bias")
ChunkOutputs = namedtuple("ChunkOutputs", "x dt k q D")
ChunkConfig = namedtuple("ChunkConfig", "CHUNK DOUBLINGS BLOCK INDEX N PADDED PRECISION")


def chunks_forward(args: ChunkArguments, save: bool) -> tuple[Tensor, Tensor]:
    """Runs `vilonghorn.ops.chunked.scan_chunked`, and with `save` returns the states before chunks."""
    from .chunks import chunks_forward as kernel

    y = torch.empty(args.x.shape, dtype=args.x.dtype, device=args.x.device)
    states = torch.empty(chunk_states(args) if save else 0, dtype=torch.float32, device=args.x.device)
    _, launch = _chunk_launch(args)
    launch(kernel, y, states if save else None)
    return y, states


def chunks_backward(dy: Tensor, args: ChunkArguments, states: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of x, dt, k, q, D and dt_bias."""
    from .chunks import chunks_backward as kernel

    (G, B, L, D, N, *_), (programs, launch) = args.sizes, _chunk_launch(args)
    dx = torch.empty(args.x.shape, dtype=args.x.dtype, device=args.x.device)
    shapes = ((programs, G, B, L), (programs, G, B, L, N), (programs, G, B, L, N), (B, G, D))
    new = torch.empty if args.x.numel() else torch.zeros  # nothing is launched for no tokens
    ddt, dk, dq, dD = (new(shape, dtype=torch.float32, device=args.x.device) for shape in shapes)
    launch(kernel, dy.contiguous(), states, ChunkOutputs(dx, ddt, dk, dq, None if args.D is None else dD))
    H = args.dt.shape[-1]
    ddt = ddt.unflatten(0, (H, programs // H)).sum(1).movedim(0, -1)
    grads = (dx, ddt, dk.sum(0), dq.sum(0), dD.sum(0), ddt.sum((1, 2)))
    return tuple(None if t is None else grad.to(t.dtype).contiguous() for grad, t in zip(grads, args))


def chunk_states(args: ChunkArguments) -> tuple[int, ...]:
    """Shape of the states before each chunk."""
    G, B, L, D, N, *_ = args.sizes
    return G, B, -(-L // CHUNK_TOKENS), N, D


def _chunk_launch(args: ChunkArguments) -> tuple[int, Callable]:
    """The number of programs for the channels of a sequence, and a function that launches a kernel with its tensors."""
    G, B, L, D, N, *_ = args.sizes
    H = args.dt.shape[-1]
    inputs = ChunkInputs(*(None if t is None else _rows(t) for t in args[: len(ChunkInputs._fields)]))
    strides = ChunkInputs(*((0,) if t is None else t.stride()[:-1] for t in inputs))
    # With bfloat16 x, factors of products are rounded to TF32. Else a product is three of TF32, as exact as float32,
    # and needs more registers.
    block, precision = (32, "tf32") if args.x.dtype == torch.bfloat16 else (16, "tf32x3")
    if torch.version.hip:
        precision = "ieee"
    padded, doublings = max(16, 1 << (N - 1).bit_length()), CHUNK_TOKENS.bit_length() - 1
    index = _index_type(L * D, L * N, *(L * stride[-1] + D for stride in strides[:4]))
    config = ChunkConfig(CHUNK_TOKENS, doublings, block, index, N, padded, precision)
    programs, reverse = H * -(-(D // H) // block), _direction_bits("scan_chunked", args.reverse)

    def launch(kernel, *tensors) -> None:
        if args.x.numel():
            with torch.cuda.device_of(args.x):
                scalars = (L, D // H, D, reverse)
                kernel[(B, programs, G)](inputs, strides, *tensors, *scalars, config, num_warps=1, num_stages=2)

    return programs, launch


def _direction_bits(operator: str, reverse: Sequence[int]) -> int:
    """Flags as bits of one integer: bit g is that of direction g."""
    if len(reverse) > MAX_DIRECTIONS:
        raise ValueError(f"{operator}: {len(reverse)} directions, backend {NAME!r} runs at most {MAX_DIRECTIONS}")
    return sum(flag << g for g, flag in enumerate(reverse))


def _index_type(*reach: int) -> Any:
    """Triton's type for offsets within a sequence, given how far they reach."""
    import triton.language as tl

    return tl.int32 if max(reach) < INDEX_LIMIT else tl.int64


class _Params:
    """The arguments that the kernels share; `dy` is given for backward."""

    def __init__(self, args: ScanArguments, dy: Tensor | None = None):
        G, B, L, D, N, *_ = args.sizes
        self.args, self.tile = args, tile_of(N)
        self.blocks = -(-D // self.tile.channels)
        mean = args.reduce == "mean"
        self.grid = (B, self.blocks, 1 if mean else G)  # with mean, a program runs all directions

        activations = (None if t is None else _rows(t).expand(G, B, L, -1) for t in (*args[:5], dy))
        inputs = Inputs(*activations, *(None if t is None else _rows(t) for t in args[6:8]))
        strides = Inputs(*((0, 0, 0) if t is None else t.stride()[:-1] for t in inputs))
        self.inputs = (inputs, strides, None if args.A is None else self.tiles(args.A))
        self.scalars = (D, L, _direction_bits("scan", args.reverse))
        index = _index_type(L * D, *(L * stride[-1] + D for stride in strides[:6]))
        self.config = Config(RULES[args.rule].number, G, mean, CHUNK, HELD[args.rule], index, N, self.tile)

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

    def launch(self, kernel, *outputs: Any) -> None:
        with torch.cuda.device_of(self.args.x):
            kernel[self.grid](*self.inputs, *outputs, *self.scalars, self.config, **OPTIONS)


def _rows(t: Tensor) -> Tensor:
    """A tensor whose last stride is 1, copied only if necessary."""
    return t if t.stride(-1) == 1 else t.contiguous()
