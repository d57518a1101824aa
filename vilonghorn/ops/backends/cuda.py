"""The CUDA backend: calls the compiled kernels of `kernels/cuda` for NVIDIA GPUs, on torch's stream.

There are no kernels for float64 and float16, of scans for more than MAX_STATES states or an odd number of channels, and
of convolutions beside those of `takes_conv`.
`kernels/cuda/scan.cu` chooses the kernel.
"""

import ctypes
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._torch import raw_stream
from ..arguments import ConvArguments, MambaInnerArguments, MixerWeights, ScanArguments, Sizes, tensors
from ..rules import NO_RULE, kernel_state_dtype
from . import triton
from .bindings import DTYPE_NUMBERS, NORM, Params, ScanParams, conv_params, open_library

NAME = "cuda"
STATE_EVERY = 8  # steps between two saved states
LANES = 64  # channels of a saved state are padded to the tile of a warp
MAX_STATES = 16  # VL_CUDA_MAX_STATES
ALIGNMENT = 16  # bytes that kernels read of saved states in one access
# The rank of dt is padded to one. For others than of 8 cuBLAS chooses slow kernels, for others than of 16 Triton reads
# k and q, which lie in the same rows, number by number.
RANK_MULTIPLE = 16
MAX_DIRECTIONS = 64
MAX_NORM = 1024  # VL_CUDA_MAX_NORM
TAPS = 4  # of a convolution over the sequence, the only number with kernels
GRID_FILTER = (3, 3)  # the same over a grid
MAX_STRIDE = 2**31 - 1
ONE_OR_OPPOSITE = [False], [True], [False, True]  # sorted flags of directions
DTYPES = (torch.float32, torch.bfloat16)


@functools.cache
def _open() -> tuple[ctypes.CDLL | None, str | None]:
    """The library and None, or None and the reason why it is not available."""
    library, reason = open_library(NAME, "nvcc")
    return (None, reason) if library is None else (declare(library), None)


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Sets the argument and result types other than int."""
    library.vl_cuda_error.restype = ctypes.c_char_p
    for size in ("scan_partials", "conv_rows", "norm_rows"):
        getattr(library, f"vl_cuda_{size}").restype = ctypes.c_int64
    for kernel in ("scan_forward", "scan_backward", "conv_forward", "conv_backward", "norm_backward"):
        getattr(library, f"vl_cuda_{kernel}").argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    return library


def unavailable(device: str | torch.device, dtype: torch.dtype = torch.float32) -> str | None:
    """Why the library cannot run on that device and dtype, or None if it can."""
    device = torch.device(device)
    if device.type != "cuda":
        return "runs on CUDA devices only"
    if dtype not in DTYPES:
        return f"takes {', '.join(map(str, DTYPES))}, not {dtype}"
    if not torch.cuda.is_available():
        return _unavailable_on(-1)
    return _unavailable_on(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _unavailable_on(device: int) -> str | None:
    if torch.version.hip is not None:
        return "runs on NVIDIA devices only"
    library, reason = _open()
    if library is None:
        return reason
    if device < 0:
        return "torch finds no CUDA device"
    if not (error := library.vl_cuda_check(device)):
        return None
    name, capability = torch.cuda.get_device_name(device), ".".join(map(str, torch.cuda.get_device_capability(device)))
    reason = f"does not run on {name} (compute capability {capability}): {library.vl_cuda_error(error).decode()}"
    warnings.warn(f"vilonghorn's CUDA library {reason}. Triton runs scans instead, and torch the rest.", stacklevel=2)
    return reason


def empty_states(args: ScanArguments | MambaInnerArguments, save: bool) -> Tensor:
    """Memory for the saved states; see `Backend`."""
    return args.sizes.empty_states(args[0], STATE_EVERY, LANES, kernel_state_dtype(args[0].dtype, args.rule), save)


def forward(args: ScanArguments, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Runs a scan; see `Backend`."""
    params = _CudaParams(args)
    outputs = params.forward_outputs(empty_states(args, save))
    params.run(_open()[0].vl_cuda_scan_forward, accumulate=args.reduce == "mean")
    return outputs


def backward(
    dy: Tensor, dstate: Tensor | None, args: ScanArguments, saved_states: Tensor, out: Mapping[str, Tensor] = {}
) -> tuple[Tensor | None, ...]:
    """Gradients of a scan; see `Backend`.

    `out` may hold memory of x's dtype for those of k, q and z: slices of the last axis of contiguous tensors.
    """
    params = _CudaParams(args)
    if saved_states.data_ptr() % ALIGNMENT:  # part of a larger tensor, which a hook for saved tensors may return
        saved_states = saved_states.clone()
    grads = params.backward_outputs(dy, dstate, saved_states, out)
    params.fields["dk_step"] = grads["k"].stride(2)
    if args.z is not None:
        params.fields["dz_step"] = grads["z"].stride(1)
    params.run(_open()[0].vl_cuda_scan_backward, accumulate=args.z is not None)
    pairs = zip(grads.values(), tensors(args))
    return tuple([None if t is None else grad if grad.dtype == t.dtype else grad.to(t.dtype) for grad, t in pairs])


def takes_conv(taps: int, reverse: Sequence[int], conv_grid: Sequence[int], length: int) -> bool:
    """Whether there is a kernel of a convolution with so many taps over so many tokens.

    That is for `TAPS` in one direction or in two opposite ones, and on a grid without a class token for `GRID_FILTER`
    in one direction.
    """
    if conv_grid:
        rows, columns, *sides = conv_grid
        return tuple(sides) == GRID_FILTER and len(reverse) == 1 and rows * columns == length
    return taps == TAPS and sorted(map(bool, reverse)) in ONE_OR_OPPOSITE


def _conv_params(args: ConvArguments) -> Params:
    if args.weight.data_ptr() % ALIGNMENT:
        args = args._replace(weight=args.weight.clone())
    return conv_params(args, args.x.dtype)


def conv_forward(args: ConvArguments, z: Tensor | None = None) -> Tensor:
    """Runs a convolution that `takes_conv`, with SiLU, on a grid also times silu(z)."""
    params = _conv_params(args)
    params.activation("z", z)
    y = params.output("y", (len(args.reverse), *args.x.shape))
    _queue("conv_silu", _open()[0].vl_cuda_conv_forward, params)
    return y


def conv_backward(
    dy: Tensor, args: ConvArguments, dx: Tensor | None = None, z: Tensor | None = None, dz: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias; that of x is written to `dx` if it is given, whose channels are contiguous.

    With z that of z is written to `dz`, whose strides are those of `dx`.
    """
    (G, D, K), library, params = args.weight.shape, _open()[0], _conv_params(args)
    params.activation("dy", dy)
    params.activation("z", z)
    dx = params.output("dx", args.x.shape, out=dx)
    params.fields["dx_step"] = dx.stride(1)
    if dz is not None:
        params.pointer("dz", dz)
    dweight, dbias = params.gradient("dweight", args.weight), params.gradient("dbias", args.bias)
    params.output("partials", (library.vl_cuda_conv_rows(params.pack()), G, K + 1, D), torch.float32)
    _queue("conv_silu", library.vl_cuda_conv_backward, params)
    return dx, dweight.to(args.weight.dtype), dbias.to(args.bias.dtype)


def takes_norm(x: Tensor, weight: Tensor) -> bool:
    """Whether `norm_backward` has a kernel: rows of a multiple of four channels, up to MAX_NORM, and a float weight."""
    return x.shape[-1] % 4 == 0 and x.shape[-1] <= MAX_NORM and x.numel() > 0 and weight.dtype == torch.float32


def norm_backward(dy: Tensor, dx: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """dx and the gradient of x, added, and that of weight, for the gradient dy of `rms_norm`(x, weight, eps)."""
    channels, library = x.shape[-1], _open()[0]
    sizes = dict(batch=x.numel() // channels, channels=channels, eps=eps, dy_dtype=DTYPE_NUMBERS[dy.dtype])
    params = Params(NORM, x.dtype, x.device, **sizes)
    given = dict(dy=dy, add=dx, x=x)
    for name, t in given.items():
        t = t.contiguous()
        params.pointer(name, t if t.data_ptr() % (4 * t.itemsize) == 0 else t.clone())
    params.parameter("weight", weight)
    out, dweight = params.output("dx", x.shape), params.output("dweight", weight.shape, torch.float32)
    params.output("partials", (library.vl_cuda_norm_rows(params.pack()), channels), torch.float32)
    _queue("rms_norm", library.vl_cuda_norm_backward, params)
    return out, dweight


def takes_sizes(sizes: Sizes) -> bool:
    """Whether there is a kernel of the scan: for up to MAX_STATES states, and pairs of channels."""
    return sizes.N <= MAX_STATES and sizes.D % 2 == 0


def missing_kernel(args: ScanArguments) -> str | None:
    """What of a scan there is no kernel for, or None."""
    if not takes_sizes(args.sizes):
        return f"takes up to {MAX_STATES} states and an even number of channels, not {args.sizes.N} and {args.sizes.D}"
    if (args.reduce == "mean" or args.z is not None) and sorted(map(bool, args.reverse)) not in ONE_OR_OPPOSITE:
        return f"takes one direction or two opposite ones with a mean or a gate, not {list(args.reverse)}"
    return None


def takes_mamba_inner(args: MambaInnerArguments) -> bool:
    """Whether there are kernels for valid arguments of `mamba_inner`; without a rule, on a grid only."""
    if not takes_conv(args.weights.conv_weight.shape[-1], args.reverse, args.conv_grid, args.xz.shape[1]):
        return False
    return bool(args.conv_grid) if args.rule == NO_RULE else takes_sizes(args.sizes)


def mamba_inner_outputs(args: MambaInnerArguments, save: bool) -> tuple[Tensor, ...]:
    """Memory for y, and with `save` and a rule for u, the projections, dt and the saved states, else empty tensors."""
    G, B, L, D, N, _, R, H = args.sizes
    new = args.xz.new_empty
    if args.rule == NO_RULE:
        return new(B, L, D), *(new(0) for _ in range(4))
    shapes = [(G, B, L, D), (G, B * L, R + -R % RANK_MULTIPLE + 2 * N), (G, B, L, H if args.in_chunks else D)]
    states = (triton.empty_states if args.in_chunks else empty_states)(args, save)
    return new(B, L, D), *(new(shape if save else 0) for shape in shapes), states


def mamba_inner_forward(args: MambaInnerArguments, save: bool) -> tuple[Tensor, ...]:
    """Runs `vilonghorn.ops.mamba_inner`; returns the filled `mamba_inner_outputs`. x_proj, dt_proj have xz's dtype."""
    if args.rule == NO_RULE:
        y = conv_forward(_conv_within(args), args.xz.narrow(2, args.sizes.D, args.sizes.D))
        return y[0], *(y.new_empty(0) for _ in range(4))
    weights = _kernel_weights(args)
    args = args._replace(weights=weights)
    G, B, L, D, *_, R, _ = args.sizes
    u = conv_forward(_conv_within(args))
    projected = torch.bmm(u.view(G, B * L, D), weights.x_proj.mT)  # (G, B * L, R + 2N)
    dt = torch.bmm(projected.narrow(2, 0, R), weights.dt_proj.mT).view(G, B, L, weights.dt_proj.shape[1])
    y, _, saved_states = (triton.forward if args.in_chunks else forward)(_scan_within(args, u, projected, dt), save)
    saved = u, projected, dt, saved_states
    return y, *(saved if save else (t.new_empty(0) for t in saved))


def mamba_inner_backward(
    dy: Tensor, args: MambaInnerArguments, u: Tensor, projected: Tensor, dt: Tensor, saved_states: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients of the tensors of `args`, in their order; None for those absent."""
    D, dxz = args.sizes.D, torch.empty_like(args.xz, memory_format=torch.contiguous_format)
    dx, dz = dxz.narrow(2, 0, D), dxz.narrow(2, D, D)
    if args.rule == NO_RULE:
        _, dconv_weight, dconv_bias = conv_backward(dy, _conv_within(args), dx, args.xz.narrow(2, D, D), dz)
        return dxz, dconv_weight, dconv_bias, *[None] * 5
    padding, H, weights = -args.sizes.R % RANK_MULTIPLE, args.sizes.H, _kernel_weights(args)
    args = args._replace(weights=weights)
    G, B, L, D, N, _, R, _ = args.sizes
    dprojected = torch.empty_like(projected)
    rows = dprojected.view(G, B, L, R + 2 * N)
    dk, dq = rows.narrow(3, R, N), rows.narrow(3, R + N, N)
    scan, run = _scan_within(args, u, projected, dt), triton.backward if args.in_chunks else backward
    du, ddt, *_, dA, dD, ddt_bias, _ = run(dy, None, scan, saved_states, dict(k=dk, q=dq, z=dz))
    ddt, u = ddt.flatten(1, 2), u.flatten(1, 2)
    torch.bmm(ddt, weights.dt_proj, out=dprojected.narrow(2, 0, R))
    du.flatten(1, 2).baddbmm_(dprojected, weights.x_proj)
    _, dconv_weight, dconv_bias = conv_backward(du, _conv_within(args), dx)
    dx_proj = _sum_of_products(dprojected, u)[:, padding:]
    ddt_proj = _sum_of_products(ddt, projected.narrow(2, 0, R))[..., padding:]
    if H < ddt_proj.shape[1]:
        ddt_proj, ddt_bias = (t.unflatten(1, (H, D // H)).sum(2) for t in (ddt_proj, ddt_bias))
    return dxz, dconv_weight, dconv_bias, dx_proj.contiguous(), ddt_proj.contiguous(), ddt_bias, dA, dD


def _kernel_weights(args: MambaInnerArguments) -> MixerWeights:
    """The weights as the kernels take them: zeros align the rank of dt, and each channel has a dt, except in chunks."""
    weights, repeats = args.weights, 1 if args.in_chunks else args.sizes.D // args.sizes.H
    if padding := -args.sizes.R % RANK_MULTIPLE:
        dt_proj = F.pad(weights.dt_proj, (padding, 0))
        weights = weights._replace(x_proj=F.pad(weights.x_proj, (0, 0, padding, 0)), dt_proj=dt_proj)
    if repeats > 1:
        dt_proj, dt_bias = (t.repeat_interleave(repeats, 1) for t in (weights.dt_proj, weights.dt_bias))
        weights = weights._replace(dt_proj=dt_proj, dt_bias=dt_bias)
    return weights


def _sum_of_products(a: Tensor, b: Tensor) -> Tensor:
    """(G, T, M) and (G, T, N) to (G, M, N). In a loop: in a batch cuBLAS does not split the sum over T."""
    out = a.new_empty(len(a), a.shape[2], b.shape[2])
    for x, y, total in zip(a, b, out):
        torch.mm(x.mT, y, out=total)
    return out


def _conv_within(args: MambaInnerArguments) -> ConvArguments:
    x, weights = args.xz.narrow(2, 0, args.sizes.D), args.weights
    return ConvArguments(x, weights.conv_weight, weights.conv_bias, args.reverse, conv_grid=args.conv_grid)


def _scan_within(args: MambaInnerArguments, u: Tensor, projected: Tensor, dt: Tensor) -> ScanArguments:
    (G, B, L, D, N, _, R, _), weights = args.sizes, args.weights
    rows, z = projected.view(G, B, L, R + 2 * N), args.xz.narrow(2, D, D)
    k, q = rows.narrow(3, R, N), rows.narrow(3, R + N, N)  # slices by `[...]` take twice as long
    options: dict[str, Any] = dict(rule=args.rule, reverse=args.reverse, reduce="mean")
    return ScanArguments(u, dt, k, q, z, weights.A, weights.D, weights.dt_bias, **options)


class _CudaParams(ScanParams):
    def __init__(self, args: ScanArguments):
        if len(args.reverse) > MAX_DIRECTIONS:
            raise ValueError(f"scan: the CUDA kernels take up to {MAX_DIRECTIONS} directions, not {len(args.reverse)}")
        self.channels = args.x.shape[-1]
        super().__init__(args, args.x.dtype, STATE_EVERY)

    def activation(self, name: str, t: Tensor | None) -> None:
        """As `Params.activation`; copies tensors whose pairs of channels are not aligned."""
        if t is not None and t.shape[-1] == self.channels:
            if t.data_ptr() % (2 * t.itemsize) or any([stride % 2 for stride in t.stride()[:-1]]):
                t = t.clone(memory_format=torch.contiguous_format)
        super().activation(name, t)
        if (step := self.fields.get(f"{name}_step", 0)) > MAX_STRIDE:
            raise ValueError(f"scan: tokens lie {step} elements apart, the CUDA kernels take up to {MAX_STRIDE}")

    def run(self, function, accumulate: bool) -> None:
        """Queues a kernel; `accumulate` if its directions add to one result."""
        fields, is_backward = self.fields, "dx" in self.fields
        if accumulate and fields["directions"] > 1:
            width = fields["dz_step" if is_backward else "channels"]
            self.output("accumulator", (fields["batch"] * fields["length"], width), torch.float32)
        if is_backward:
            self.output("partials", (_open()[0].vl_cuda_scan_partials(self.pack()),), torch.float32)
        _queue("scan", function, self)


def _queue(operator: str, function: Callable, params: Params) -> None:
    """Queues a kernel on torch's stream."""
    error = _call(function, params.device, params.pack())
    if error:
        raise RuntimeError(f"{operator}: the CUDA kernel could not run: {_open()[0].vl_cuda_error(error).decode()}")


def _call(function: Callable, device: torch.device, struct: bytes) -> int:
    if device.index == torch.cuda.current_device():
        return function(struct, device.index, raw_stream(device.index))
    with torch.cuda.device(device):
        return function(struct, device.index, raw_stream(device.index))
