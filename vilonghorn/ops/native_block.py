"""What surrounds the scan on a processor: calls of the compiled convolution, mixer and norm."""

from __future__ import annotations

import torch
from torch import Tensor

from .abi import Call, Conv, Mix, Norm, Scan
from .arguments import RULES, MixArguments
from .native import CHUNK, LANES, add_up, library, run, share
from .project import product, weight_gradient

GRAIN = 8192  # numbers that a thread should have for its share of a norm


def conv_forward(x: Tensor, weight: Tensor, bias: Tensor, reverse: tuple[bool, ...], level: int = -1) -> Tensor:
    """Depthwise convolution with SiLU for each direction; see `vilonghorn.ops.conv_silu`."""
    call = _conv_call(x, weight, bias, reverse)
    y = call.output("y", (len(reverse), *x.shape))
    run(library.vl_conv_forward, call.struct, level)
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
    run(library.vl_conv_backward, call.struct, level)
    return dx, dweight.sum(0).mT.contiguous().to(weight.dtype), dbias.sum(0).to(bias.dtype)


def mix_forward(args: MixArguments, save: bool, level: int = -1) -> tuple[Tensor, Tensor, Tensor]:
    """What a mixer does after its input projection; see `vilonghorn.ops.mix`.

    Returns y, and what backward starts from: the projections, (G, B, L, R + 2N), and with `save` the checkpoints.
    """
    call = _MixCall(args)
    y = call.output("y", args.sizes)
    checkpoints = call.output("checkpoints", call.checkpoint_shape, call.real) if save else y.new_empty(0, dtype=call.real)
    projected = call.output("projected", call.projected_shape, call.real, call.mix)
    call.run(library.vl_mix_forward, level)
    if args.out_proj is not None:
        y = product(y, args.out_proj.to(y.dtype))
    return y, projected, checkpoints


def mix_backward(
    dy: Tensor, args: MixArguments, projected: Tensor, checkpoints: Tensor, level: int = -1
) -> tuple[Tensor | None, ...]:
    """Gradients of xz and of the weights in `mix`'s order; None for those absent."""
    call = _MixCall(args, meeting=2)
    (B, L, D), G, (R, P), real = args.sizes, len(args.reverse), (call.mix.rank, call.projected_shape[-1]), call.real
    grads, dout = {}, dy
    if args.out_proj is not None:  # its input is not kept: the kernel makes it again
        dy = product(dout, args.out_proj.to(dout.dtype).t())
        y = call.output("y", args.sizes, real)
    call.struct.dy = call.input(dy)
    call.set(checkpoints=checkpoints.view(call.checkpoint_shape))
    call.set(call.mix, projected=projected)
    call.output("dprojected", (call.struct.parts, *call.projected_shape), real, call.mix)
    if call.struct.parts > 1:
        call.output("dx", (G, B, L, D), real)
    dxz = args.xz.new_empty((B, L, 2 * D))
    call.struct.dz_step = 2 * D
    call.set(call.mix, dx=dxz)
    call.set(dz=dxz[..., D:])
    scan_shapes = dict(dt_bias=(D,), D=(D,)) | ({} if args.A is None else dict(A=args.A.shape[1:]))
    mix_shapes = dict(conv_weight=(call.mix.taps, D), conv_bias=(D,), x_proj=(P, D), dt_proj=(R, D))
    for struct, shapes in ((None, scan_shapes), (call.mix, mix_shapes)):
        grads |= {name: call.output(f"d{name}", (B, G, *shape), real, struct) for name, shape in shapes.items()}
    call.run(library.vl_mix_backward, level)
    grads = {name: grad.sum(0) for name, grad in grads.items()}
    for name in ("conv_weight", "dt_proj"):  # which the kernel holds transposed
        grads[name] = grads[name].mT.contiguous()
    if args.out_proj is not None:
        grads["out_proj"] = weight_gradient(dout, y.to(dout.dtype))
    return dxz, *(None if w is None else grads[name].to(w.dtype) for name, w in args.weights().items())


def norm_forward(x: Tensor, weight: Tensor, eps: float, level: int = -1) -> tuple[Tensor, Tensor]:
    """Root-mean-square normalisation of x's rows, and the factor of each for backward; see `vilonghorn.ops.rms_norm`."""
    call = _norm_call(x, weight, eps)
    y, scale = call.output("y", x.shape), call.output("scale", x.shape[:-1], call.real)
    run(library.vl_norm_forward, call.struct, level)
    return y, scale


def norm_backward(dy: Tensor, x: Tensor, weight: Tensor, scale: Tensor, level: int = -1) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight."""
    call = _norm_call(x, weight, 0.0)
    call.set(scale=scale, dy=dy.to(x.dtype).contiguous())
    dx, dweight = call.output("dx", x.shape), call.output("dweight", (call.struct.parts, *weight.shape), call.real)
    run(library.vl_norm_backward, call.struct, level)
    return dx, dweight.sum(0).to(weight.dtype)


def _norm_call(x: Tensor, weight: Tensor, eps: float) -> Call:
    rows, channels = x.numel() // x.shape[-1], x.shape[-1]
    call = Call(Norm(batch=rows, channels=channels, eps=eps), x.dtype, (), x.device)
    call.set(x=x.contiguous())
    call.parameters(weight=weight)
    call.struct.threads = torch.get_num_threads()
    call.struct.parts = max(1, min(rows * channels // GRAIN, 4 * call.struct.threads))
    return call


class _MixCall(Call):
    """A call of checked arguments; `struct` is the scan within, `meeting` how many results its directions add up to."""

    def __init__(self, args: MixArguments, meeting: int = 1):
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
        share(self, jobs=B, channels=D)
        add_up(self, True, meeting)

    def run(self, function, level: int) -> None:
        run(function, self.mix, level)


def _conv_call(x: Tensor, weight: Tensor, bias: Tensor, reverse: tuple[bool, ...]) -> Call:
    (B, L, D), (G, _, K) = x.shape, weight.shape
    call = Call(Conv(groups=G, batch=B, length=L, channels=D, taps=K), x.dtype, reverse, x.device)
    call.struct.x = call.input(x)
    call.parameters(weight=weight.transpose(1, 2), bias=bias)
    share(call, jobs=B, channels=D)
    return call
