"""The compiled kernels of `kernels/` for processors: opens their library with ctypes and calls it.

The structs that it passes are in `abi`; the library knows nothing of torch.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from .abi import Call, Conv, Mix, Scan, ScanCall, open_library
from .arguments import RULES, MixArguments, ScanArguments

NAME = "cpu"
CHUNK = 32  # steps between two saved states: smaller costs memory, larger outgrows the cache in backward
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


_library, _reason = _open()


def unavailable(device_type: str, dtype: torch.dtype = torch.float32) -> str | None:
    """Why the library cannot run on that device type and dtype, or None if it can. It takes every dtype."""
    return "runs on the CPU alone" if device_type != "cpu" else _reason


def levels() -> dict[str, int]:
    """Instruction set levels of the library that this processor runs, by name, the plainest first."""
    if _library is None:
        return {}
    runs = (level for level in range(_library.vl_levels()) if _library.vl_level_runs(level))
    return {_library.vl_level_name(level).decode(): level for level in runs}


def multiply_adds(rounds: int, level: int) -> int:
    """Does nothing but multiply-adds of float32, on this thread and without the GIL; returns how many lanes there were.

    Held against the clock, it tells what the processor can do. `level` is one of `levels()`.
    """
    return _library.vl_multiply_adds(level, rounds)


def forward(args: ScanArguments, save: bool, level: int = -1) -> tuple[Tensor, Tensor]:
    """The scan, and the states before every CHUNK-th step if `save` (in the kernel's own layout).

    `level` is one of `levels()`; -1 takes the best.
    """
    call = _scan_call(args)
    y, checkpoints = call.forward_outputs(save)
    _add_up(call, args.reduce == "mean")
    _run(_library.vl_scan_forward, call.struct, level)
    return y, checkpoints


def backward(dy: Tensor, args: ScanArguments, checkpoints: Tensor, level: int = -1) -> tuple[Tensor | None, ...]:
    """Gradients of x, dt, k, q, z, A, D and dt_bias; None for those absent."""
    call = _scan_call(args)
    outputs = call.backward_outputs(dy, checkpoints)
    _add_up(call, args.z is not None)
    _run(_library.vl_scan_backward, call.struct, level)
    return call.gradients(outputs)


def conv_forward(x: Tensor, weight: Tensor, bias: Tensor, reverse: tuple[bool, ...], level: int = -1) -> Tensor:
    """Depthwise convolution with SiLU for each direction; see `vilonghorn.ops.conv_silu`."""
    call = _conv_call(x, weight, bias, reverse)
    y = call.output("y", (len(reverse), *x.shape))
    _run(_library.vl_conv_forward, call.struct, level)
    return y


def conv_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, reverse: tuple[bool, ...], level: int = -1
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias."""
    call = _conv_call(x, weight, bias, reverse)
    G, D, K = weight.shape
    call.struct.dy = call.input(dy)
    dx = call.output("dx", x.shape)
    dweight, dbias = (call.output(name, (len(x), G, *shape), call.real) for name, shape in dict(dweight=(K, D), dbias=(D,)).items())
    _run(_library.vl_conv_backward, call.struct, level)
    return dx, dweight.sum(0).mT.contiguous().to(weight.dtype), dbias.sum(0).to(bias.dtype)


def mix_forward(args: MixArguments, save: bool, level: int = -1) -> tuple[Tensor, Tensor, Tensor]:
    """What a mixer does between its input and output projections; see `vilonghorn.ops.mix`.

    Returns y, and what backward starts from: the projections, (G, B, L, R + 2N), and with `save` the checkpoints.
    """
    call = _MixCall(args)
    B, L, D = args.sizes
    y = call.output("y", (B, L, D))
    checkpoints = call.output("checkpoints", call.checkpoint_shape, call.real) if save else y.new_empty(0, dtype=call.real)
    projected = call.output("projected", call.projected_shape, call.real, call.mix)
    call.run(_library.vl_mix_forward, level)
    return y, projected, checkpoints


def mix_backward(
    dy: Tensor, args: MixArguments, projected: Tensor, checkpoints: Tensor, level: int = -1
) -> tuple[Tensor | None, ...]:
    """Gradients of xz, conv_weight, conv_bias, x_proj, dt_proj, dt_bias, A and D; None for A if absent."""
    call = _MixCall(args)
    (B, L, D), G, real = args.sizes, len(args.reverse), call.real
    call.set(checkpoints=checkpoints.view(call.checkpoint_shape))
    call.set(call.mix, projected=projected)
    call.struct.dy = call.input(dy)
    call.output("dprojected", (call.struct.parts, *call.projected_shape), real, call.mix)
    if call.struct.parts > 1:
        call.output("dx", (G, B, L, D), real)
    dxz = args.xz.new_empty((B, L, 2 * D))
    call.struct.dz_step = 2 * D
    call.set(call.mix, dx=dxz)
    call.set(dz=dxz[..., D:])
    grads = {name: call.output(name, (B, *args.A.shape), real) for name in ("dA",) if args.A is not None}
    grads |= {name: call.output(name, (B, G, D), real) for name in ("ddt_bias", "dD")}
    shapes = dict(dconv_weight=(call.mix.taps, D), dconv_bias=(D,), dx_proj=(call.projected_shape[-1], D), ddt_proj=(call.mix.rank, D))
    grads |= {name: call.output(name, (B, G, *shape), real, call.mix) for name, shape in shapes.items()}
    call.run(_library.vl_mix_backward, level)
    sums = [grads[f"d{name}"].sum(0) if f"d{name}" in grads else None for name in args.weights()]
    sums[0], sums[3] = sums[0].mT.contiguous(), sums[3].mT.contiguous()  # the kernel's convolution and steps are transposed
    return dxz, *(None if g is None else g.to(w.dtype) for g, w in zip(sums, args.weights().values()))


class _MixCall(Call):
    """A call of checked arguments; `struct` is the scan within."""

    def __init__(self, args: MixArguments):
        (B, L, D), (G, P, _), R = args.sizes, args.x_proj.shape, args.dt_proj.shape[-1]
        N = (P - R) // 2
        self.mix = Mix(taps=args.conv_weight.shape[-1], rank=R)
        self.mix.scan = Scan(groups=G, batch=B, length=L, channels=D, states=N, chunk=CHUNK, mean=1, rule=RULES.index(args.rule))
        super().__init__(self.mix.scan, args.xz.dtype, args.reverse, args.xz.device)
        self.struct.x, self.struct.z = (self.input(half) for half in args.xz.chunk(2, dim=-1))
        self.parameters(A=args.A, D=args.D, dt_bias=args.dt_bias)
        weights = dict(conv_weight=args.conv_weight.mT, conv_bias=args.conv_bias, x_proj=args.x_proj, dt_proj=args.dt_proj.mT)
        self.parameters(self.mix, **weights)
        self.projected_shape = (G, B, L, P)
        self.checkpoint_shape = (G, B, -(-L // CHUNK), N, -(-D // LANES) * LANES)
        _share(self, jobs=B, channels=D)
        _add_up(self, True)

    def run(self, function, level: int) -> None:
        _run(function, self.mix, level)


def _add_up(call: Call, meet: bool) -> None:
    """Room for float32 sums of what directions add to one result, where that is of a shorter type."""
    s = call.struct
    if meet and s.groups > 1 and call.dtype != call.real:
        call.output("sums", (s.batch, s.length, s.channels), call.real)


def _scan_call(args: ScanArguments) -> ScanCall:
    call = ScanCall(args, args.x.dtype, CHUNK, LANES)
    _share(call, jobs=args.x.shape[1], channels=args.x.shape[3])
    return call


def _conv_call(x: Tensor, weight: Tensor, bias: Tensor, reverse: tuple[bool, ...]) -> Call:
    (B, L, D), (G, _, K) = x.shape, weight.shape
    call = Call(Conv(groups=G, batch=B, length=L, channels=D, taps=K), x.dtype, reverse, x.device)
    call.struct.x = call.input(x)
    call.parameters(weight=weight.transpose(1, 2), bias=bias)
    _share(call, jobs=B, channels=D)
    return call


def _share(call: Call, jobs: int, channels: int) -> None:
    """Sequences share the work; where they are too few to keep the threads evenly busy, so do parts of the channels."""
    threads = torch.get_num_threads()
    lanes = LANES // 2 if call.dtype == torch.float64 else LANES
    wanted = 1 if threads == 1 else -(-4 * threads // max(jobs, 1))
    call.struct.threads, call.struct.parts = threads, max(1, min(wanted, -(-channels // lanes)))


def _run(function, struct: ctypes.Structure, level: int) -> None:
    if function(ctypes.byref(struct), level):
        raise RuntimeError(f"the CPU kernel could not run: out of memory, or level {level} is not among {levels()}")
