"""The CPU backend: calls the compiled kernels of `kernels/cpu` for the scan, the mixer around it and a whole block.

The library picks the best instruction set that the processor supports. The environment variable VILONGHORN_ISA chooses
another: "v2", "v3", "v4", "vnni" (v4 with AVX512_VNNI) or "amx" (vnni with AMX_BF16) on x86-64, "generic" elsewhere.

With "amx", blocks and MLPs follow `torch.set_float32_matmul_precision`: at "high" the products of their linear layers
are three products of bfloat16 values with float32 sums (about 16 bits of mantissa), at "medium" one (8 bits). At
"highest", the default, and without AMX they are float32.

Some kernels need working memory. The calling thread keeps it for later calls, in the size of its largest call.
"""

import ctypes
import itertools
import math
import os
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TypeVar

import torch
from torch import Tensor
from torch.profiler import record_function

from .._torch import is_profiling
from ..validate import (
    RULES,
    BlockArguments,
    ConvArguments,
    MambaInnerArguments,
    MlpArguments,
    NormArguments,
    ScanArguments,
    Sizes,
)
from .bindings import Block, Grid, Input, MambaInner, Mlp, Norm, Params, Scan, ScanParams, conv_params, open_library

NAME = "cpu"
CHUNK = 64  # steps between two saved states: smaller costs memory, larger outgrows the cache in backward
LANES = 16  # channels of a saved state are padded to the widest vector
ISA_VARIABLE = "VILONGHORN_ISA"
BF16_PARTS = {"highest": 0, "high": 2, "medium": 1}  # of a float32 factor, by torch's precision
P = TypeVar("P", bound=Params)
# Stages of a block, by the numbers that the library gives them.
FORWARD_STAGES = ("norm", "in_proj", "mamba_inner", "out_proj")
BACKWARD_STAGES = (
    "out_proj_backward mamba_inner_backward out_proj_gradient in_proj_backward norm_backward in_proj_gradient".split()
)


def _open() -> tuple[ctypes.CDLL | None, str | None]:
    """The library, or None; and the reason why it cannot run, or None."""
    library, reason = open_library(NAME, "a C++ compiler")
    if library is None:
        return None, reason
    library.vl_level_name.restype = library.vl_threading.restype = ctypes.c_char_p
    library.vl_multiply_adds.argtypes, library.vl_multiply_adds.restype = (ctypes.c_int, ctypes.c_int64), ctypes.c_int64
    if not any(library.vl_level_runs(isa) for isa in range(library.vl_levels())):
        return None, "the library was built for instruction sets that this processor does not support"
    name, levels = os.environ.get(ISA_VARIABLE), _levels(library)
    if name and name not in levels:
        return library, f"{ISA_VARIABLE} is {name!r}, expected one of {', '.join(map(repr, levels))}"
    return library, None


def unavailable(device_type: str, dtype: torch.dtype = torch.float32) -> str | None:
    """Why the library cannot run on that device type and dtype, or None if it can. It takes every dtype."""
    return "runs on the CPU only" if device_type != "cpu" else _reason


def isa_levels() -> dict[str, int]:
    """The instruction sets of the library that this processor supports, ascending: name to index in the library."""
    return {} if library is None else _levels(library)


def _levels(library: ctypes.CDLL) -> dict[str, int]:
    supported = (isa for isa in range(library.vl_levels()) if library.vl_level_runs(isa))
    return {library.vl_level_name(isa).decode(): isa for isa in supported}


library, _reason = _open()
_isa = isa_levels().get(os.environ.get(ISA_VARIABLE, ""), -1)  # -1: the best
_amx = isa_levels().get("amx")  # the best one where the processor has it


def has_bf16_products() -> bool:
    """Whether the instruction set in use has products of bfloat16 values."""
    return _amx is not None and _isa in (-1, _amx)


def multiply_adds(rounds: int, isa: int) -> int:
    """Runs float32 multiply-adds on this thread, without the GIL, and returns their number; `isa` is an index."""
    return library.vl_multiply_adds(isa, rounds)


def checkpoint_dtype(args: ScanArguments) -> torch.dtype:
    """Dtype of the saved states."""
    return args.compute_dtype


def forward(args: ScanArguments, save: bool) -> tuple[Tensor, Tensor]:
    """Runs a scan; see `Backend`."""
    params = _set_parallelism(ScanParams(args, args.x.dtype, CHUNK, LANES))
    y, checkpoints = params.forward_outputs(save, checkpoint_dtype(args))
    _alloc_accumulator(params, args.reduce == "mean")
    _run(library.vl_scan_forward, params.struct)
    return y, checkpoints


def backward(dy: Tensor, args: ScanArguments, checkpoints: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of a scan; see `Backend`."""
    params = _set_parallelism(ScanParams(args, args.x.dtype, CHUNK, LANES))
    parameters = zip(("dA", "dD", "ddt_bias"), args[5:8])
    outputs = *params.backward_outputs(dy, checkpoints), *(params.gradient(name, p) for name, p in parameters)
    _alloc_accumulator(params, args.z is not None)
    _run(library.vl_scan_backward, params.struct)
    split = params.struct.channel_splits > 1  # dk and dq have an axis of the parts to sum
    return tuple(
        None if grad is None else (grad.sum(0) if split and name in ("k", "q") else grad).to(t.dtype)
        for name, grad, t in zip(args._fields, outputs, args)
    )


def mamba_inner_forward(args: MambaInnerArguments, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Runs `vilonghorn.ops.mamba_inner`; returns y, and to save the projections (G, B, L, R + 2N) and checkpoints."""
    G, B, L, D, N, _, R = sizes = args.sizes
    params, fused = _mamba_inner_params(args, sizes)
    dtype, num_saved = params.compute_dtype, sizes.num_checkpoints(CHUNK, LANES)
    checkpoints = params.output("checkpoints", (num_saved,), dtype) if save else args.xz.new_empty(0, dtype=dtype)
    projected = params.output("projected", (G, B, L, R + 2 * N), dtype, fused)
    y = params.output("y", (B, L, D))  # allocated last: freed first, it does not fragment the heap
    _run(library.vl_mix_forward, fused)
    return y, projected if save else projected.new_empty(0), checkpoints


def mamba_inner_backward(
    dy: Tensor, args: MambaInnerArguments, projected: Tensor, checkpoints: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients of the tensors of `args`, in their order; None for those absent."""
    G, B, L, D, *_ = sizes = args.sizes
    params, fused = _mamba_inner_params(args, sizes, num_accumulated=2)
    scan, dtype = params.struct, params.compute_dtype
    scan.dy, scan.checkpoints = params.activation(dy), params.pointer(checkpoints)
    fused.projected = params.pointer(projected)
    params.output("dprojected", (scan.channel_splits, *projected.shape), dtype, fused)
    if scan.channel_splits > 1:
        params.output("dx", (G, B, L, D), dtype)
    dxz = params.output("dx", (B, L, 2 * D), struct=fused)
    scan.dz, scan.dz_step = dxz.data_ptr() + D * dxz.element_size(), 2 * D
    weights = list(zip(args._fields[1:8], args[1:8]))
    grads = [params.gradient(f"d{name}", w, scan if hasattr(scan, f"d{name}") else fused) for name, w in weights]
    _run(library.vl_mix_backward, fused)
    return dxz, *(None if grad is None else grad.to(w.dtype) for grad, (_, w) in zip(grads, weights))


def conv_forward(args: ConvArguments) -> Tensor:
    """Runs `vilonghorn.ops.conv_silu`."""
    params = _conv_params(args)
    y = params.output("y", (len(args.weight), *args.x.shape))
    _run(library.vl_conv_forward, params.struct)
    return y


def conv_backward(dy: Tensor, args: ConvArguments) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias."""
    params = _conv_params(args)
    params.struct.dy = params.activation(dy)
    dx = params.output("dx", args.x.shape)
    dweight, dbias = params.gradient("dweight", args.weight), params.gradient("dbias", args.bias)
    _run(library.vl_conv_backward, params.struct)
    return dx, dweight.to(args.weight.dtype), dbias.to(args.bias.dtype)


def norm_forward(args: NormArguments, save: bool) -> tuple[Tensor, Tensor]:
    """Runs `vilonghorn.ops.rms_norm`; returns y, and to save 1 / sqrt(mean(x^2) + eps) of each row."""
    params, shape = _norm_params(args), args.x.shape
    y, scale = params.output("y", shape), params.output("scale", shape[:-1], params.compute_dtype)
    _run(library.vl_norm_forward, params.struct)
    return y, scale if save else scale.new_empty(0)


def norm_backward(dy: Tensor, args: NormArguments, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight."""
    params = _norm_params(args)
    params.struct.scale, params.struct.dy = params.pointer(scale), params.pointer(dy.to(args.x.dtype).contiguous())
    dx = params.output("dx", args.x.shape)
    dweight = params.gradient("dweight", args.weight)
    _run(library.vl_norm_backward, params.struct)
    return dx, dweight.to(args.weight.dtype)


def block_forward(args: BlockArguments, save: bool) -> tuple[Tensor, ...]:
    """Runs `vilonghorn.ops.block`.

    Returns the result, and with `save` what backward reads, else empty tensors: xz, (B, L, 2D); the projections,
    (G, B, L, R + 2N); and the checkpoints, in one dimension.
    """
    G, B, L, D, N, _, R = sizes = args.sizes
    _require("block")
    struct, _tensors = _block_struct(args, sizes)
    new = args.x.new_empty
    xz, projected = new(B, L, 2 * D), new(G, B, L, R + 2 * N)
    checkpoints = new(sizes.num_checkpoints(CHUNK, LANES) if save else 0)
    out = new(args.x.shape)  # allocated last, as in mamba_inner_forward
    struct.out, struct.xz, struct.projected = out.data_ptr(), xz.data_ptr(), projected.data_ptr()
    if save:
        struct.checkpoints = checkpoints.data_ptr()
    _run_stages(library.vl_block_forward, FORWARD_STAGES, struct)
    return (out, xz, projected, checkpoints) if save else (out, new(0), new(0), checkpoints)


def block_backward(
    dout: Tensor, saved: Sequence[Tensor], args: BlockArguments, wanted: Sequence[int]
) -> list[Tensor | None]:
    """Gradients of the tensors of `args`, in their order; None for those absent.

    The weights of the two linear layers get empty gradients where they are not `wanted`.
    """
    struct, _tensors = _block_struct(args, args.sizes)
    dout = dout.contiguous()
    struct.dout = dout.data_ptr()
    struct.xz, struct.projected, struct.checkpoints = (t.data_ptr() for t in saved)
    grads = _gradients(struct, args, 11, wanted)
    _run_stages(library.vl_block_backward, BACKWARD_STAGES, struct)
    return grads


def gated_mlp_forward(args: MlpArguments, save: bool) -> tuple[Tensor, Tensor]:
    """Runs `vilonghorn.ops.gated_mlp`; returns the result, and to save g and v, (..., 2H)."""
    _require("gated_mlp")
    struct, _tensors = _mlp_struct(args)
    gv = args.x.new_empty((*args.x.shape[:-1], 2 * struct.hidden) if save else 0)
    out = args.x.new_empty(args.x.shape)  # allocated last, as in mamba_inner_forward
    struct.out = out.data_ptr()
    if save:
        struct.gv = gv.data_ptr()
    _run(library.vl_mlp_forward, struct)
    return out, gv


def gated_mlp_backward(
    dout: Tensor, saved: Sequence[Tensor], args: MlpArguments, wanted: Sequence[int]
) -> list[Tensor | None]:
    """Gradients of the tensors of `args`, in their order; of the weights, empty ones where they are not `wanted`."""
    struct, _tensors = _mlp_struct(args)
    dout = dout.contiguous()
    struct.dout, struct.gv = dout.data_ptr(), saved[0].data_ptr()
    grads = _gradients(struct, args, 4, wanted)
    _run(library.vl_mlp_backward, struct)
    return grads


def blocks_forward(pairs: Sequence[tuple[BlockArguments, MlpArguments | None]]) -> Tensor:
    """Runs blocks, each with its MLP or None, one after the other, on contiguous tokens.

    All calls are prepared before the first one runs.
    """
    _require("blocks")
    x, sizes = pairs[0][0].x, [args.sizes for args, _ in pairs]
    xz = x.new_empty(max(B * L * 2 * D for _, B, L, D, *_ in sizes))
    projected = x.new_empty(max(G * B * L * (R + 2 * N) for G, B, L, _, N, _, R in sizes))
    streams = x.new_empty(x.shape), x.new_empty(x.shape)
    calls: list[tuple[Block | Mlp, list]] = []
    for (args, mlp), size in zip(pairs, sizes):
        struct, tensors = _block_struct(args, size)
        struct.xz, struct.projected = xz.data_ptr(), projected.data_ptr()
        calls += [(struct, tensors)] if mlp is None else [(struct, tensors), _mlp_struct(mlp)]
    given = x
    for (struct, _), out in zip(calls, itertools.cycle(streams)):
        struct.x, struct.out = given.data_ptr(), out.data_ptr()
        given = out
    for struct, _ in calls:
        if isinstance(struct, Block):
            _run_stages(library.vl_block_forward, FORWARD_STAGES, struct)
        else:
            with record_function("vilonghorn::gated_mlp") if is_profiling() else nullcontext():
                _run(library.vl_mlp_forward, struct)
    return given


def _require(operator: str) -> None:
    if (reason := unavailable("cpu")) is not None:
        raise RuntimeError(f"{operator}: {reason}")


def num_channel_splits(jobs: int, channels: int, lanes: int, threads: int) -> int:
    """Into how many parts the channels of a sequence are split, so that the threads are evenly busy.

    As few as possible: each part computes gradients of k and q for itself.
    """
    wanted = 1 if jobs >= 4 * threads else threads // math.gcd(jobs, threads)
    return max(1, min(wanted, -(-channels // lanes)))


def _mamba_inner_params(args: MambaInnerArguments, sizes: Sizes, num_accumulated: int = 1) -> tuple[Params, MambaInner]:
    """The parameters of the scan within, and the struct around it."""
    G, B, L, D, N, K, R = sizes
    scan = Scan(G, B, L, D, N, CHUNK, 1, RULES.index(args.rule), True)
    fused = MambaInner(scan, K, R, Grid.of(args.grid))
    params = Params(fused.scan, args.xz.dtype, args.reverse, args.xz.device)
    x = params.struct.x = params.activation(args.xz)
    params.struct.z = Input((x.data or 0) + D * params.dtype.itemsize, x.direction, x.batch, x.step)
    params.struct.A, params.struct.D, params.struct.dt_bias = map(params.parameter, (args.A, args.D, args.dt_bias))
    fused.conv_weight, fused.conv_bias = params.parameter(args.conv_weight), params.parameter(args.conv_bias)
    fused.x_proj, fused.dt_proj = params.parameter(args.x_proj), params.parameter(args.dt_proj)
    _set_parallelism(params)
    _alloc_accumulator(params, True, num_accumulated)
    return params, fused


def _conv_params(args: ConvArguments) -> Params:
    return _set_parallelism(conv_params(args))


def _norm_params(args: NormArguments) -> Params:
    (x, weight, eps), C = args, args.x.shape[-1]
    struct = Norm(x.numel() // C, C, threads=torch.get_num_threads(), eps=eps)
    params = Params(struct, x.dtype, (), x.device)
    struct.x, struct.weight = params.pointer(x.contiguous()), params.parameter(weight)
    return params


def _block_struct(args: BlockArguments, sizes: Sizes) -> tuple[Block, list[Tensor | None]]:
    """The struct, and the tensors it points to, which the caller must hold during the call."""
    (G, B, L, D, N, K, R), dim, threads = sizes, args.x.shape[-1], torch.get_num_threads()
    tensors = [None if t is None else t.contiguous() for t in args[:11]]
    splits = num_channel_splits(B, D, LANES, threads)
    form = (RULES.index(args.rule), args.residual, threads, _bf16_parts(args.bf16), args.eps)
    options = (*form, Grid.of(args.grid), bytes(args.reverse))
    pointers = (None if t is None else t.data_ptr() for t in tensors)
    return Block(B, L, dim, G, D, N, K, R, CHUNK, splits, *options, *pointers), tensors


def _gradients(
    struct: Block | Mlp, args: BlockArguments | MlpArguments, num_tensors: int, wanted: Sequence[int]
) -> list[Tensor | None]:
    """Allocates what `block_backward` and `gated_mlp_backward` return, in the struct too."""
    grads: list[Tensor | None] = []
    for name, t, needed in zip(args._fields, args[:num_tensors], wanted):
        if t is None:
            grads.append(None)
        elif not needed and name in ("in_proj", "out_proj"):
            grads.append(t.new_empty(0))
        else:
            grad = t.new_empty(t.shape)
            setattr(struct, "d" + name, grad.data_ptr())
            grads.append(grad)
    return grads


def _mlp_struct(args: MlpArguments) -> tuple[Mlp, list[Tensor]]:
    """As `_block_struct`."""
    tensors = [t.contiguous() for t in args[:4]]
    (*_, dim), hidden = args.x.shape, args.out_proj.shape[1]
    options = (args.residual, torch.get_num_threads(), _bf16_parts(args.bf16), args.eps)
    return Mlp(args.x.numel() // dim, dim, hidden, *options, *(t.data_ptr() for t in tensors)), tensors


def _bf16_parts(bf16: bool) -> int:
    return 1 if bf16 else BF16_PARTS[torch.get_float32_matmul_precision()]


def _set_parallelism(params: P) -> P:
    """Threads share the sequences, and where these are few also parts of their channels."""
    s, threads = params.struct, torch.get_num_threads()
    lanes = LANES // 2 if params.dtype == torch.float64 else LANES
    s.threads, s.channel_splits = threads, num_channel_splits(s.batch, s.channels, lanes, threads)
    return params


def _alloc_accumulator(params: Params, shared: bool, num_results: int = 1) -> None:
    """Memory for float32 sums over directions, if they have `shared` results of a shorter dtype."""
    s = params.struct
    if shared and s.directions > 1 and params.dtype != params.compute_dtype:
        params.output("accumulator", (s.batch, s.length, num_results * s.channels), params.compute_dtype)


def _run(function, struct: ctypes.Structure, *stage: int) -> None:
    if function(ctypes.byref(struct), *stage, _isa):
        raise RuntimeError("the CPU kernel could not run: out of memory")


def _run_stages(function, stages: Sequence[str], struct: Block) -> None:
    """Runs all stages in one call; while a profile is taken, each in a call that the profile names."""
    if not is_profiling():
        return _run(function, struct, -1)
    for number, stage in enumerate(stages):
        with record_function(f"vilonghorn::block/{stage}"):
            _run(function, struct, number)
