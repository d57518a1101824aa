"""The CPU backend: calls the compiled kernels of `kernels/cpu` for the scan, the mixer around it and a whole block.

The library picks the best instruction set that the processor supports. The environment variable VILONGHORN_ISA chooses
another: "v2", "v3", "v4", "vnni" (v4 with AVX512_VNNI) or "amx" (vnni with AMX_BF16) on x86-64, "generic" elsewhere.

With "amx", blocks follow `torch.set_float32_matmul_precision`: at "high" the products of their linear layers are three
products of bfloat16 values with float32 sums (about 16 bits of mantissa), at "medium" one (8 bits). At "highest", the
default, and without AMX they are float32.

The kernels compute in float32 or float64. Tensors of shorter dtypes are converted, and their results are rounded once.

Some kernels need working memory. The calling thread keeps it for later calls, in the size of its largest call.
"""

import ctypes
import math
import os
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.profiler import record_function

from .._torch import is_profiling
from ..arguments import BlockArguments, ConvArguments, MambaInnerArguments, NormArguments, ScanArguments, Sizes
from ..register import register_op
from ..rules import NO_RULE
from ..validate import validate_block
from .bindings import (
    BLOCK,
    BLOCK_OUTPUTS,
    BLOCK_TENSORS,
    UNKNOWN_RULE,
    ConvGrid,
    Input,
    MambaInner,
    Norm,
    Params,
    Scan,
    ScanParams,
    conv_params,
    flags_address,
    open_library,
    rule_number,
)

NAME = "cpu"
CHUNK = 64  # steps between two saved states: smaller costs memory, larger outgrows the cache in backward
LANES = 16  # channels of a saved state are padded to the widest vector
ISA_VARIABLE = "VILONGHORN_ISA"
BF16_PARTS = {"highest": 0, "high": 2, "medium": 1}  # of a float32 factor, by torch's precision
P = TypeVar("P", bound=Params)
# Stages of a block, by the numbers that the library gives them.
FORWARD_STAGES = ("norm", "in_proj", "mamba_inner", "out_proj", "mlp")
BACKWARD_STAGES = (
    "mlp_backward out_proj_backward mamba_inner_backward out_proj_gradient in_proj_backward norm_backward "
    "in_proj_gradient"
).split()
MLP_STAGES = ("mlp", "mlp_backward")


def _open() -> tuple[ctypes.CDLL | None, str | None]:
    """The library, or None; and the reason why it cannot run, or None."""
    library, reason = open_library(NAME, "a C++ compiler")
    if library is None:
        return None, reason
    for function in (library.vl_isa_name, library.vl_threading, library.vl_error):
        function.restype = ctypes.c_char_p
    if not any(library.vl_isa_runs(isa) for isa in range(library.vl_isas())):
        return None, "the library was built for instruction sets that this processor does not support"
    name, supported = os.environ.get(ISA_VARIABLE), _isas(library)
    if name and name not in supported:
        return library, f"{ISA_VARIABLE} is {name!r}, expected one of {', '.join(map(repr, supported))}"
    return library, None


def unavailable(device: str | torch.device, dtype: torch.dtype = torch.float32) -> str | None:
    """Why the library cannot run on that device and dtype, or None if it can. It takes every dtype."""
    return "runs on the CPU only" if getattr(device, "type", device) != "cpu" else _reason


def isas() -> dict[str, int]:
    """The instruction sets of the library that this processor supports, ascending: name to index in the library."""
    return {} if library is None else _isas(library)


def _isas(library: ctypes.CDLL) -> dict[str, int]:
    supported = (isa for isa in range(library.vl_isas()) if library.vl_isa_runs(isa))
    return {library.vl_isa_name(isa).decode(): isa for isa in supported}


library, _reason = _open()
_isa = isas().get(os.environ.get(ISA_VARIABLE, ""), -1)  # -1: the best
_amx = isas().get("amx")  # the best one where the processor has it


def has_bf16_products() -> bool:
    """Whether the instruction set in use has products of bfloat16 values."""
    return _amx is not None and _isa in (-1, _amx)


def empty_states(args: ScanArguments | MambaInnerArguments | BlockArguments, save: bool) -> Tensor:
    """Memory for the saved states; see `Backend`."""
    dtype = torch.promote_types(args[0].dtype, torch.float32)
    return args.sizes.empty_states(args[0], CHUNK, LANES, dtype, save)


def forward(args: ScanArguments, save: bool) -> tuple[Tensor, Tensor]:
    """Runs a scan; see `Backend`."""
    params = _share_work(ScanParams(args, args.compute_dtype, CHUNK, LANES))
    y, states = params.forward_outputs(empty_states(args, save))
    _run(library.vl_scan_forward, params.struct)
    return y.to(args.x.dtype), states


def backward(dy: Tensor, args: ScanArguments, saved_states: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of a scan; see `Backend`."""
    params = _share_work(ScanParams(args, args.compute_dtype, CHUNK, LANES))
    grads = params.backward_outputs(dy, saved_states, params.dtype)
    _run(library.vl_scan_backward, params.struct)
    if params.struct.channel_splits > 1:
        grads[2], grads[3] = grads[2].sum(0), grads[3].sum(0)
    return tuple(None if grad is None else grad.to(t.dtype) for grad, t in zip(grads, args))


def mamba_inner_outputs(args: MambaInnerArguments, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for y, and with `save` for the projections (G, B, L, R + 2N) and the states, else empty tensors."""
    (G, B, L, D, N, _, R, _), states = args.sizes, empty_states(args, save)
    projected = states.new_empty((G, B, L, R + 2 * N) if save else 0)
    return args.xz.new_empty(B, L, D), projected, states


def mamba_inner_forward(args: MambaInnerArguments, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Runs `vilonghorn.ops.mamba_inner`; returns the filled `mamba_inner_outputs`."""
    params, inner = _mamba_inner_params(args)
    y, projected, states = mamba_inner_outputs(args, save)
    y = y.to(params.dtype)
    params.struct.y, params.struct.saved_states = params.pointer(y), params.pointer(states)
    G, B, L, _, N, _, R, _ = args.sizes
    params.output("projected", (G, B, L, R + 2 * N), states.dtype, inner, projected if save else None)
    _run(library.vl_mamba_inner_forward, inner)
    return y.to(args.xz.dtype), projected, states


def mamba_inner_backward(
    dy: Tensor, args: MambaInnerArguments, projected: Tensor, saved_states: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients of the tensors of `args`, in their order; None for those absent."""
    G, B, L, D = args.sizes[:4]
    params, inner = _mamba_inner_params(args)
    scan = params.struct
    scan.dy, scan.saved_states = params.activation(dy), params.pointer(saved_states)
    inner.projected = params.pointer(projected)
    params.output("dprojected", (scan.channel_splits, *projected.shape), struct=inner)
    if scan.channel_splits > 1 and args.rule != NO_RULE:
        params.output("dx", (G, B, L, D))
    dxz = params.output("dx", (B, L, 2 * D), struct=inner)
    scan.dz, scan.dz_step = dxz.data_ptr() + D * dxz.element_size(), 2 * D
    weights = list(zip(args._fields[1:8], args[1:8]))
    grads = [params.gradient(f"d{name}", w, scan if hasattr(scan, f"d{name}") else inner) for name, w in weights]
    _run(library.vl_mamba_inner_backward, inner)
    return dxz.to(args.xz.dtype), *(None if grad is None else grad.to(w.dtype) for grad, (_, w) in zip(grads, weights))


def conv_forward(args: ConvArguments) -> Tensor:
    """Runs `vilonghorn.ops.conv_silu`."""
    params = _share_work(conv_params(args, _compute_dtype(args.x)))
    y = params.output("y", (len(args.weight), *args.x.shape))
    _run(library.vl_conv_forward, params.struct)
    return y.to(args.x.dtype)


def conv_backward(dy: Tensor, args: ConvArguments) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias."""
    params = _share_work(conv_params(args, _compute_dtype(args.x)))
    params.struct.dy = params.activation(dy)
    dx = params.output("dx", args.x.shape)
    dweight, dbias = params.gradient("dweight", args.weight), params.gradient("dbias", args.bias)
    _run(library.vl_conv_backward, params.struct)
    return dx.to(args.x.dtype), dweight.to(args.weight.dtype), dbias.to(args.bias.dtype)


def norm_forward(args: NormArguments, save: bool) -> tuple[Tensor, Tensor]:
    """Runs `vilonghorn.ops.rms_norm`; returns y, and to save 1 / sqrt(mean(x^2) + eps) of each row."""
    params, shape = _norm_params(args), args.x.shape
    y, scale = params.output("y", shape), params.output("scale", shape[:-1])
    _run(library.vl_norm_forward, params.struct)
    return y.to(args.x.dtype), scale if save else scale.new_empty(0)


def norm_backward(dy: Tensor, args: NormArguments, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight."""
    params = _norm_params(args)
    params.struct.scale, params.struct.dy = params.pointer(scale), params.pointer(dy.to(params.dtype).contiguous())
    dx = params.output("dx", args.x.shape)
    dweight = params.gradient("dweight", args.weight)
    _run(library.vl_norm_backward, params.struct)
    return dx.to(args.x.dtype), dweight.to(args.weight.dtype)


def block_outputs(args: BlockArguments, save: bool) -> tuple[Tensor, ...]:
    """Memory for the result of a block, and for what backward reads.

    That is xz, (B, L, 2D); the projections, (G, B, L, R + 2N); the saved states, in one dimension; and with an MLP its
    input and both halves of its hidden values, (B, L, 2M). Without `save`, or without an MLP, they are empty.
    """
    G, B, L, D, N, _, R, _ = args.sizes
    new, hidden = args.x.new_empty, _hidden(args)
    shapes = [(B, L, 2 * D), (G, B, L, R + 2 * N), args.x.shape if hidden else 0, (B, L, 2 * hidden) if hidden else 0]
    xz, projected, mid, gv = (new(shape if save else 0) for shape in shapes)
    return new(args.x.shape), xz, projected, empty_states(args, save), mid, gv


def block_forward(args: BlockArguments, save: bool) -> tuple[Tensor, ...]:
    """Runs `vilonghorn.ops.block`; returns the filled `block_outputs`."""
    _require("block")
    outputs = block_outputs(args, True)
    call, _tensors = _pack_block(args, args.sizes, args.x.contiguous(), [t.data_ptr() for t in outputs], save)
    _run_stages(library.vl_block_forward, FORWARD_STAGES, call, _hidden(args) > 0)
    return outputs if save else (outputs[0], *(t.new_empty(0) for t in outputs[1:]))


def block_backward(
    dout: Tensor, saved: Sequence[Tensor], args: BlockArguments, wanted: Sequence[int]
) -> list[Tensor | None]:
    """Gradients of the tensors of `args`, in their order; None for those absent and for drop_scales.

    The weights of the linear layers get empty gradients where they are not `wanted`.
    """
    grads: list[Tensor | None] = []
    for name, t, needed in zip(BLOCK_TENSORS, args, wanted):
        skipped = not needed and name.endswith(("in_proj", "out_proj"))
        grads.append(None if t is None else t.new_empty(0 if skipped else t.shape))
    dout = dout.contiguous()
    outputs = [0, *(t.data_ptr() for t in saved), dout.data_ptr()]
    outputs += [0 if grad is None else grad.data_ptr() for grad in grads]
    call, _tensors = _pack_block(args, args.sizes, args.x.contiguous(), outputs, True)
    _run_stages(library.vl_block_backward, BACKWARD_STAGES, call, _hidden(args) > 0)
    return [*grads, None]


def blocks_forward(blocks: Sequence[BlockArguments], sizes: Sequence[Sizes]) -> Tensor:
    """Runs blocks of validated arguments and their sizes one after the other, on the tokens of the first one.

    Returning to Python between blocks costs time (cold caches), so all calls are prepared before the first one runs.
    """
    _require("blocks")
    x = blocks[0].x.contiguous()
    xz = x.new_empty(max(B * L * 2 * D for _, B, L, D, *_ in sizes))
    projected = x.new_empty(max(G * B * L * (R + 2 * N) for G, B, L, _, N, _, R, _ in sizes))
    streams = x.new_empty(x.shape), x.new_empty(x.shape)
    calls = []
    for args, size in zip(blocks, sizes):
        mid, out = streams[::-1] if x is streams[0] else streams
        if not _hidden(args):
            mid, out = out, mid
        # With an MLP, the result may overwrite x, which is read by the mixer only.
        pointers = [t.data_ptr() for t in (out, xz, projected)]
        calls.append((*_pack_block(args, size, x, [*pointers, 0, mid.data_ptr()]), _hidden(args) > 0))
        x = out
    for call, _, has_mlp in calls:
        _run_stages(library.vl_block_forward, FORWARD_STAGES, call, has_mlp)
    return x


def _require(operator: str) -> None:
    if (reason := unavailable("cpu")) is not None:
        raise RuntimeError(f"{operator}: {reason}")


def num_channel_splits(jobs: int, channels: int, lanes: int, threads: int) -> int:
    """Into how many parts the channels of a sequence are split, so that the threads are evenly busy.

    As few as possible: each part computes gradients of k and q for itself.
    """
    wanted = 1 if jobs >= 4 * threads else threads // math.gcd(jobs, threads)
    return max(1, min(wanted, -(-channels // lanes)))


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _mamba_inner_params(args: MambaInnerArguments) -> tuple[Params, MambaInner]:
    """The parameters of the scan within, and the struct around it."""
    G, B, L, D, N, K, R, H = args.sizes
    scan = Scan(G, B, L, D, N, CHUNK, 1, rule_number(args.rule), True)
    inner = MambaInner(scan, K, R, H, ConvGrid(*args.conv_grid[:3]))
    params = Params(inner.scan, _compute_dtype(args.xz), args.reverse, args.xz.device)
    x = params.struct.x = params.activation(args.xz)
    params.struct.z = Input((x.data or 0) + D * params.dtype.itemsize, x.direction, x.batch, x.step)
    params.struct.A, params.struct.D, params.struct.dt_bias = map(params.parameter, (args.A, args.D, args.dt_bias))
    inner.conv_weight, inner.conv_bias = params.parameter(args.conv_weight), params.parameter(args.conv_bias)
    inner.x_proj, inner.dt_proj = params.parameter(args.x_proj), params.parameter(args.dt_proj)
    _share_work(params)
    return params, inner


def _hidden(args: BlockArguments) -> int:
    """Width of the MLP, or 0."""
    return 0 if args.mlp_out_proj is None else args.mlp_out_proj.shape[1]


def _norm_params(args: NormArguments) -> Params:
    (x, weight, eps), C = args, args.x.shape[-1]
    struct = Norm(x.numel() // C, C, threads=torch.get_num_threads(), eps=eps)
    params = Params(struct, _compute_dtype(x), (), x.device)
    struct.x, struct.weight = params.pointer(x.to(params.dtype).contiguous()), params.parameter(weight)
    return params


def _pack_block(
    args: BlockArguments, sizes: Sizes, x: Tensor, outputs: Sequence[int], save: bool = False
) -> tuple[bytes, list[Tensor | None]]:
    """A VlBlock, and the tensors it points to, which the caller must hold during the call, like `outputs`.

    `outputs` are the pointers of the struct from `out` on.
    """
    G, B, L, D, N, K, R, H = sizes
    threads = torch.get_num_threads()
    bf16_parts = 1 if args.bf16 else BF16_PARTS[torch.get_float32_matmul_precision()]
    splits = num_channel_splits(B, D, LANES, threads)
    numbers = (B, L, x.shape[-1], G, D, N, K, R, H, CHUNK, splits, _hidden(args))
    options = (rule_number(args.rule), threads, bf16_parts, save, args.eps, args.mlp_eps)
    tensors = [x, *(None if t is None else t.contiguous() for t in args[1:15])]
    pointers = [0 if t is None else t.data_ptr() for t in tensors]
    grid, reverse = args.conv_grid[:3] or (0, 0, 0), flags_address(tuple(args.reverse))[0]
    absent = [0] * (BLOCK_OUTPUTS - len(outputs))
    return BLOCK.pack(*numbers, *options, *grid, 0, reverse, *pointers, *outputs, *absent), tensors


def _share_work(params: P) -> P:
    """Threads share the sequences, and where these are few also parts of their channels."""
    s, threads = params.struct, torch.get_num_threads()
    lanes = LANES // 2 if params.dtype == torch.float64 else LANES
    s.threads, s.channel_splits = threads, num_channel_splits(s.batch, s.channels, lanes, threads)
    return params


def _run(function, struct: ctypes.Structure | bytes, *stage: int) -> None:
    code = function(struct if isinstance(struct, bytes) else ctypes.byref(struct), *stage, _isa)
    if code == UNKNOWN_RULE:
        raise RuntimeError("the CPU library has no kernel for this rule; use backend='reference'")
    if code:
        raise RuntimeError(f"the CPU kernel could not run: {library.vl_error(code).decode()}")


def _run_stages(function, stages: Sequence[str], call: bytes, has_mlp: bool) -> None:
    """Runs all stages in one call; while a profile is taken, each in a call that the profile names."""
    if not is_profiling():
        return _run(function, call, -1)
    for number, stage in enumerate(stages):
        if has_mlp or stage not in MLP_STAGES:
            with record_function(f"vilonghorn::block/{stage}"):
                _run(function, call, number)


# The operator `vilonghorn::block` with its gradient; `vilonghorn.ops.block` explains its arguments.
run_block = register_op(
    "block",
    BlockArguments,
    validate_block,
    num_saved=5,
    forward=block_forward,
    fake=block_outputs,
    backward=block_backward,
)
