"""The CPU backend: calls the compiled kernels of `kernels/cpu` for the scan, the mixer around it and a whole block.

The library picks the best instruction set of the processor, or that of VILONGHORN_ISA (docs/install.md). With AMX,
`torch.set_float32_matmul_precision` chooses the products in blocks (docs/performance.md).

The kernels compute in float32 or float64. Tensors of shorter dtypes are converted, and their results are rounded once.
The calling thread keeps their working memory for later calls, in the size of its largest call.
"""

import ctypes
import functools
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.profiler import record_function

from .._torch import is_profiling
from ..arguments import (
    BlockArguments,
    ConvArguments,
    MambaInnerArguments,
    NormArguments,
    ScanArguments,
    Sizes,
    named_tensors,
    tensors,
)
from ..rules import NO_RULE
from .bindings import (
    BLOCK_GRADIENTS,
    BLOCK_NUMBERS,
    BLOCK_POINTERS,
    INPUT_STRIDES,
    MAMBA_INNER,
    NORM,
    UNKNOWN_RULE,
    Params,
    ScanParams,
    conv_params,
    flags_address,
    grid_fields,
    open_library,
    rule_number,
)

NAME = "cpu"
STATE_EVERY = 64  # steps between two saved states: smaller costs memory, larger outgrows the cache in backward
LANES = 16  # channels of a saved state are padded to the widest vector
ISA_VARIABLE = "VILONGHORN_ISA"
BF16_PARTS = {"highest": 0, "high": 2, "medium": 1}  # of a float32 factor, by torch's precision
BLOCK_OUTPUTS = ("out", "xz", "projected", "saved_states", "mid", "gv")  # fields of VlBlock
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
    name, supported = os.environ.get(ISA_VARIABLE), isas(library)
    if not supported:
        return None, "the library was built for instruction sets that this processor does not support"
    if name and name not in supported:
        return library, f"{ISA_VARIABLE} is {name!r}, expected one of {', '.join(map(repr, supported))}"
    return library, None


def unavailable(device: str | torch.device, dtype: torch.dtype = torch.float32) -> str | None:
    """Why the library cannot run on that device and dtype, or None if it can. It takes every dtype."""
    return "runs on the CPU only" if getattr(device, "type", device) != "cpu" else _reason


def isas(of: ctypes.CDLL | None = None) -> dict[str, int]:
    """The instruction sets of the library that this processor supports, ascending: name to index in the library."""
    opened = of or library
    supported = (isa for isa in range(opened.vl_isas()) if opened.vl_isa_runs(isa)) if opened else ()
    return {opened.vl_isa_name(isa).decode(): isa for isa in supported}


library, _reason = _open()
_isa = isas().get(os.environ.get(ISA_VARIABLE, ""), -1)  # -1: the best
_amx = isas().get("amx")  # the best one where the processor has it


def has_bf16_products() -> bool:
    """Whether the instruction set in use has products of bfloat16 values."""
    return _amx is not None and _isa in (-1, _amx)


def empty_states(args: ScanArguments | MambaInnerArguments | BlockArguments, save: bool) -> Tensor:
    """Memory for the saved states; see `Backend`."""
    dtype = torch.promote_types(args[0].dtype, torch.float32)
    return args.sizes.empty_states(args[0], STATE_EVERY, LANES, dtype, save)


def forward(args: ScanArguments, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Runs a scan; see `Backend`."""
    params = _share_work(ScanParams(args, args.compute_dtype, STATE_EVERY))
    y, state, states = params.forward_outputs(empty_states(args, save))
    _check(library.vl_scan_forward(params.pack(), _isa))
    return y.to(args.x.dtype), state, states


def backward(dy: Tensor, dstate: Tensor | None, args: ScanArguments, saved_states: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of a scan; see `Backend`."""
    params = _share_work(ScanParams(args, args.compute_dtype, STATE_EVERY))
    grads = params.backward_outputs(dy, dstate, saved_states)
    _check(library.vl_scan_backward(params.pack(), _isa))
    if params.fields["channel_splits"] > 1:
        grads |= {name: grads[name].sum(0) for name in ("k", "q")}
    return tuple(None if grad is None else grad.to(t.dtype) for grad, t in zip(grads.values(), tensors(args)))


def mamba_inner_outputs(args: MambaInnerArguments, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for y, and with `save` for the projections (G, B, L, R + 2N) and the states, else empty tensors."""
    (G, B, L, D, N, _, R, _), states = args.sizes, empty_states(args, save)
    projected = states.new_empty((G, B, L, R + 2 * N) if save else 0)
    return args.xz.new_empty(B, L, D), projected, states


def mamba_inner_forward(args: MambaInnerArguments, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Runs `vilonghorn.ops.mamba_inner`; returns the filled `mamba_inner_outputs`."""
    params = _mamba_inner_params(args)
    y, projected, states = mamba_inner_outputs(args, save)
    y = params.pointer("y", y.to(params.dtype))
    params.pointer("saved_states", states)
    G, B, L, _, N, _, R, _ = args.sizes
    params.output("projected", (G, B, L, R + 2 * N), states.dtype, projected if save else None)
    _check(library.vl_mamba_inner_forward(params.pack(), _isa))
    return y.to(args.xz.dtype), projected, states


def mamba_inner_backward(
    dy: Tensor, args: MambaInnerArguments, projected: Tensor, saved_states: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients of the tensors of `args`, in their order; None for those absent."""
    G, B, L, D, *_ = args.sizes
    params = _mamba_inner_params(args)
    params.activation("dy", dy)
    params.pointer("saved_states", saved_states)
    params.pointer("projected", projected)
    splits = params.fields["channel_splits"]
    params.output("dprojected", (splits, *projected.shape))
    if splits > 1 and args.rule != NO_RULE:
        params.output("dx", (G, B, L, D))
    dxz = params.output("dxz", (B, L, 2 * D))
    params.fields |= dict(dz=dxz.data_ptr() + D * dxz.element_size(), dz_step=2 * D)
    weights = args.weights._asdict()
    grads = {name: params.gradient(f"d{name}", weight) for name, weight in weights.items()}
    _check(library.vl_mamba_inner_backward(params.pack(), _isa))
    pairs = zip(grads.values(), weights.values())
    return dxz.to(args.xz.dtype), *(None if grad is None else grad.to(w.dtype) for grad, w in pairs)


def conv_forward(args: ConvArguments) -> Tensor:
    """Runs `vilonghorn.ops.conv_silu`."""
    params = _share_work(conv_params(args, torch.promote_types(args.x.dtype, torch.float32)))
    y = params.output("y", (len(args.weight), *args.x.shape))
    _check(library.vl_conv_forward(params.pack(), _isa))
    return y.to(args.x.dtype)


def conv_backward(dy: Tensor, args: ConvArguments) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias."""
    params = _share_work(conv_params(args, torch.promote_types(args.x.dtype, torch.float32)))
    params.activation("dy", dy)
    dx = params.output("dx", args.x.shape)
    dweight, dbias = params.gradient("dweight", args.weight), params.gradient("dbias", args.bias)
    _check(library.vl_conv_backward(params.pack(), _isa))
    return dx.to(args.x.dtype), dweight.to(args.weight.dtype), dbias.to(args.bias.dtype)


def norm_forward(args: NormArguments, save: bool) -> tuple[Tensor, Tensor]:
    """Runs `vilonghorn.ops.rms_norm`; returns y, and to save 1 / sqrt(mean(x^2) + eps) of each row."""
    params, (*rows, _) = _norm_params(args), args.x.shape
    y, scale = params.output("y", args.x.shape), params.output("scale", rows)
    _check(library.vl_norm_forward(params.pack(), _isa))
    return y.to(args.x.dtype), scale if save else scale.new_empty(0)


def norm_backward(dy: Tensor, args: NormArguments, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight."""
    params = _norm_params(args)
    params.pointer("scale", scale)
    params.pointer("dy", dy.to(params.dtype).contiguous())
    dx = params.output("dx", args.x.shape)
    dweight = params.gradient("dweight", args.weight)
    _check(library.vl_norm_backward(params.pack(), _isa))
    return dx.to(args.x.dtype), dweight.to(args.weight.dtype)


def block_outputs(args: BlockArguments, save: bool) -> tuple[Tensor, ...]:
    """Memory for the `BLOCK_OUTPUTS`: the result, and with `save` what backward reads, else empty tensors.

    xz, (B, L, 2D), projections, (G, B, L, R + 2N), states; of an MLP its input and both halves of its hidden values.
    """
    G, B, L, D, N, _, R, _ = args.sizes
    new, hidden = args.x.new_empty, args.hidden
    shapes = [(B, L, 2 * D), (G, B, L, R + 2 * N), args.x.shape if hidden else 0, (B, L, 2 * hidden) if hidden else 0]
    xz, projected, mid, gv = (new(shape if save else 0) for shape in shapes)
    return new(args.x.shape), xz, projected, empty_states(args, save), mid, gv


def block_forward(args: BlockArguments, save: bool) -> tuple[Tensor, ...]:
    """Runs `vilonghorn.ops.block`; returns the filled `block_outputs`."""
    if (reason := unavailable("cpu")) is not None:
        raise RuntimeError(f"block: {reason}")
    outputs = block_outputs(args, True)
    call, _held = pack_block(args, save, dict(zip(BLOCK_OUTPUTS, outputs)))
    _run_stages(library.vl_block_forward, FORWARD_STAGES, call, args.hidden > 0)
    return outputs if save else (outputs[0], *(args.x.new_empty(0) for _ in outputs[1:]))


def block_backward(
    dout: Tensor, saved: Sequence[Tensor], args: BlockArguments, wanted: Sequence[int]
) -> list[Tensor | None]:
    """Gradients of the tensors of `args`, in their order; None for those absent and for drop_scales."""
    grads: dict[str, Tensor | None] = {}
    for name, t, needed in zip(BLOCK_GRADIENTS, tensors(args), wanted):
        skipped = not needed and name.endswith(("in_proj", "out_proj"))  # the library then computes none
        grads[name] = None if t is None else t.new_empty(0 if skipped else t.shape)
    call, _held = pack_block(args, True, {"dout": dout, **grads, **dict(zip(BLOCK_OUTPUTS[1:], saved))})
    _run_stages(library.vl_block_backward, BACKWARD_STAGES, call, args.hidden > 0)
    return [*grads.values(), None]


def pack_block(
    args: BlockArguments, save: bool = False, pointers: Mapping[str, Tensor | None] = {}
) -> tuple[bytes, dict[str, Tensor]]:
    """A VlBlock of `args` and `pointers`, by the names of its fields; and what it points to, which a caller holds."""
    bf16_parts = 1 if args.bf16 else BF16_PARTS[torch.get_float32_matmul_precision()]
    shape = args.sizes, args.x.shape[-1], args.hidden, tuple(args.conv_grid)
    options = args.rule, tuple(args.reverse), args.eps, args.mlp_eps, bf16_parts, save, torch.get_num_threads()
    given = {**named_tensors(args), **pointers}
    held = {name: t.contiguous() for name, t in given.items() if t is not None}
    pointed = BLOCK_POINTERS.pack({name: t.data_ptr() for name, t in held.items()})
    return _pack_numbers(*shape, *options) + pointed, held


@functools.lru_cache(1024)
def _pack_numbers(sizes: Sizes, dim: int, hidden: int, conv_grid: tuple[int, ...], *options: Any) -> bytes:
    rule, reverse, eps, mlp_eps, bf16_parts, save, threads = options
    G, B, L, D, N, K, R, H = sizes
    splits = num_channel_splits(B, D, LANES, threads)
    fields = dict(batch=B, length=L, dim=dim, directions=G, channels=D, states=N, d_conv=K, dt_rank=R, num_heads=H)
    fields |= dict(chunk=STATE_EVERY, channel_splits=splits, hidden=hidden, rule=rule_number(rule), threads=threads)
    fields |= dict(bf16_parts=bf16_parts, save=save, reverse=flags_address(reverse), **grid_fields(conv_grid))
    return BLOCK_NUMBERS.pack({**fields, "eps": eps, "mlp_eps": mlp_eps})


def infer_block(call: bytearray) -> None:
    """Runs a VlBlock without saving anything; the library has the memory for what lies between x and out."""
    _check(library.vl_block_infer(bytes(call), _isa))


def num_channel_splits(jobs: int, channels: int, lanes: int, threads: int) -> int:
    """Into how few parts the channels of a sequence are split, so that the threads are evenly busy."""
    # Each part computes gradients of k and q for itself.
    wanted = 1 if jobs >= 4 * threads else threads // math.gcd(jobs, threads)
    return max(1, min(wanted, -(-channels // lanes)))


def _mamba_inner_params(args: MambaInnerArguments) -> Params:
    G, B, L, D, N, K, R, H = args.sizes
    sizes = dict(
        directions=G, batch=B, length=L, channels=D, states=N, d_conv=K, dt_rank=R, num_heads=H, chunk=STATE_EVERY
    )
    options = dict(rule=rule_number(args.rule), mean=True, reverse=flags_address(args.reverse))
    dtype = torch.promote_types(args.xz.dtype, torch.float32)
    params = Params(MAMBA_INNER, dtype, args.xz.device, **sizes, **options, **grid_fields(args.conv_grid))
    params.activation("x", args.xz)
    fields = params.fields
    fields |= {f"z_{of}": fields[f"x_{of}"] for of in INPUT_STRIDES} | dict(z=fields["x"] + D * dtype.itemsize)
    for name, weight in args.weights._asdict().items():
        params.parameter(name, weight)
    return _share_work(params)


def _norm_params(args: NormArguments) -> Params:
    x, C = args.x, args.x.shape[-1]
    sizes = dict(batch=x.numel() // C, channels=C, threads=torch.get_num_threads())
    params = Params(NORM, torch.promote_types(x.dtype, torch.float32), x.device, **sizes, eps=args.eps)
    params.pointer("x", x.to(params.dtype).contiguous())
    params.parameter("weight", args.weight)
    return params


def _share_work(params: P) -> P:
    """Threads share the sequences, and where these are few also parts of their channels."""
    fields, threads = params.fields, torch.get_num_threads()
    lanes = LANES // 2 if params.dtype == torch.float64 else LANES
    splits = num_channel_splits(fields["batch"], fields["channels"], lanes, threads)
    fields |= dict(threads=threads, channel_splits=splits)
    return params


def _check(code: int) -> None:
    if code == UNKNOWN_RULE:
        raise RuntimeError("the CPU library has no kernel for this rule; use backend='reference'")
    if code:
        raise RuntimeError(f"the CPU kernel could not run: {library.vl_error(code).decode()}")


def _run_stages(function, stages: Sequence[str], call: bytes, has_mlp: bool) -> None:
    """Runs all stages in one call; while a profile is taken, each in a call that the profile names."""
    if not is_profiling():
        return _check(function(call, -1, _isa))
    for number, stage in enumerate(stages):
        if has_mlp or stage not in MLP_STAGES:
            with record_function(f"vilonghorn::block/{stage}"):
                _check(function(call, number, _isa))
