"""What surrounds the scan on a processor: calls of the compiled convolution, mixer and norm."""

from __future__ import annotations

import torch
from torch import Tensor

from ..products import product, weight_gradient
from ..validate import RULES, MixArguments, checkpoint_size
from .bindings import Call, Conv, Input, Mix, Norm, Scan
from .cpu import CHUNK, LANES, add_up, library, run, share


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
    call.struct.dy = call.input(dy)
    dx = call.output("dx", x.shape)
    dweight, dbias = call.gradient("dweight", weight), call.gradient("dbias", bias)
    run(library.vl_conv_backward, call.struct, level)
    return dx, dweight.to(weight.dtype), dbias.to(bias.dtype)


def mix_forward(args: MixArguments, save: bool, level: int = -1) -> tuple[Tensor, Tensor, Tensor]:
    """What a mixer does after its input projection; see `vilonghorn.ops.mamba_inner`.

    Returns y, and what backward starts from: the projections, (G, B, L, R + 2N), and with `save` the checkpoints.
    """
    call = _MixCall(args)
    checkpoints = (
        call.output("checkpoints", (call.checkpoint_size,), call.real)
        if save
        else args.xz.new_empty(0, dtype=call.real)
    )
    projected = call.output("projected", call.projected_shape, call.real, call.mix)
    y = call.output("y", args.sizes)  # last: where it is freed at once, it leaves no hole between what is kept
    call.run(library.vl_mix_forward, level)
    if args.out_proj is not None:
        y = product(y, args.out_proj.to(y.dtype))
    return y, projected, checkpoints


def mix_backward(
    dy: Tensor, args: MixArguments, projected: Tensor, checkpoints: Tensor, level: int = -1
) -> tuple[Tensor | None, ...]:
    """Gradients of xz and of the weights in `mix`'s order; None for those absent."""
    call = _MixCall(args, meeting=2)
    scan, fused, real = call.struct, call.mix, call.real
    (B, L, D), G = args.sizes, scan.groups
    dout = dy
    if args.out_proj is not None:  # its input is not kept: the kernel makes it again
        out_proj = args.out_proj.to(dout.dtype)
        dy, y = product(dout, out_proj.t()), call.output("y", args.sizes, real)
    scan.dy, scan.checkpoints = call.input(dy), call.pointer(checkpoints)
    fused.projected = call.pointer(projected)
    call.output("dprojected", (scan.parts, *call.projected_shape), real, fused)
    if scan.parts > 1:
        call.output("dx", (G, B, L, D), real)
    dxz = call.output("dx", (B, L, 2 * D), struct=fused)
    scan.dz, scan.dz_step = dxz.data_ptr() + D * dxz.element_size(), 2 * D
    weights = list(zip(args._fields[1:8], args[1:8]))
    grads = [call.gradient(f"d{name}", w, scan if hasattr(scan, f"d{name}") else fused) for name, w in weights]
    call.run(library.vl_mix_backward, level)
    grads = [grad if grad is None else grad.to(w.dtype) for grad, (_, w) in zip(grads, weights)]
    dout_proj = None if args.out_proj is None else weight_gradient(dout, y.to(dout.dtype)).to(args.out_proj.dtype)
    return dxz, *grads, dout_proj


def norm_forward(x: Tensor, weight: Tensor, eps: float, level: int = -1) -> tuple[Tensor, Tensor]:
    """Root-mean-square normalisation of x's rows, and the factor of each for backward; see `vilonghorn.ops.rms_norm`."""
    call = _norm_call(x, weight, eps)
    y, scale = call.output("y", x.shape), call.output("scale", x.shape[:-1], call.real)
    run(library.vl_norm_forward, call.struct, level)
    return y, scale


def norm_backward(dy: Tensor, x: Tensor, weight: Tensor, scale: Tensor, level: int = -1) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight."""
    call = _norm_call(x, weight, 0.0)
    call.struct.scale, call.struct.dy = call.pointer(scale), call.pointer(dy.to(x.dtype).contiguous())
    dx = call.output("dx", x.shape)
    dweight = call.gradient("dweight", weight)
    run(library.vl_norm_backward, call.struct, level)
    return dx, dweight.to(weight.dtype)


def _norm_call(x: Tensor, weight: Tensor, eps: float) -> Call:
    rows, channels = x.numel() // x.shape[-1], x.shape[-1]
    call = Call(Norm(batch=rows, channels=channels, eps=eps), x.dtype, (), x.device)
    call.struct.x, call.struct.weight = call.pointer(x.contiguous()), call.parameter(weight)
    call.struct.threads = torch.get_num_threads()
    return call


class _MixCall(Call):
    """A call of checked arguments; `struct` is the scan within, `meeting` how many results its directions add up to."""

    def __init__(self, args: MixArguments, meeting: int = 1):
        (B, L, D), (G, P, _), R = args.sizes, args.x_proj.shape, args.dt_proj.shape[-1]
        N = (P - R) // 2
        self.mix = mix = Mix(taps=args.conv_weight.shape[-1], rank=R)
        mix.scan = Scan(
            groups=G, batch=B, length=L, channels=D, states=N, chunk=CHUNK, mean=1, rule=RULES.index(args.rule)
        )
        super().__init__(mix.scan, args.xz.dtype, args.reverse, args.xz.device)
        x = self.struct.x = self.input(args.xz)
        self.struct.z = Input((x.data or 0) + D * self.dtype.itemsize, x.group, x.batch, x.step)
        self.struct.A, self.struct.D, self.struct.dt_bias = map(self.parameter, (args.A, args.D, args.dt_bias))
        mix.conv_weight, mix.conv_bias = self.parameter(args.conv_weight), self.parameter(args.conv_bias)
        mix.x_proj, mix.dt_proj = self.parameter(args.x_proj), self.parameter(args.dt_proj)
        self.projected_shape = (G, B, L, P)
        self.checkpoint_size = checkpoint_size(G, B, L, N, D, CHUNK, LANES)
        share(self, jobs=B, channels=D)
        add_up(self, True, meeting)

    def run(self, function, level: int) -> None:
        run(function, self.mix, level)


def _conv_call(x: Tensor, weight: Tensor, bias: Tensor, reverse: tuple[bool, ...]) -> Call:
    (B, L, D), (G, _, K) = x.shape, weight.shape
    call = Call(Conv(groups=G, batch=B, length=L, channels=D, taps=K), x.dtype, reverse, x.device)
    call.struct.x = call.input(x)
    call.struct.weight, call.struct.bias = call.parameter(weight), call.parameter(bias)
    share(call, jobs=B, channels=D)
    return call
