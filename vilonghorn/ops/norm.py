"""`rms_norm`: root-mean-square normalisation that saves one number a row for backward, not the row again."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .arguments import NormArguments
from .backends import cpu, cuda
from .register import define_op, register_op
from .validate import DTYPES


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """Returns x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich, arXiv 1910.07467).

    Runs the native kernel on a CPU that has it, else `torch.nn.functional.rms_norm`.

    x, (..., C), is float32, bfloat16, float16 or float64, as is the result; sums are float32 (float64 for float64).
    Raises ValueError if weight, (C,), is not as long as the last dimension of x, or on another device.
    """
    if cpu.unavailable(x.device.type) is not None or x.dtype not in DTYPES:
        validate_norm(NormArguments(x, weight, eps))
        return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)
    return run_norm(NormArguments(x, weight, eps))


class ResidualNorm(torch.autograd.Function):
    """x itself, and its `rms_norm` in `dtype`. A kernel of the CUDA library adds the gradients of both.

    Call it where `cuda.takes_norm`. Its forward is torch's, which compilers fuse with what is before it.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:  # noqa: D102
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return x.view_as(x), F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(dtype)

    @staticmethod
    def backward(ctx, dx: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]  # noqa: D102
        return *torch.ops.vilonghorn.residual_norm_backward(dy, dx, *ctx.saved_tensors, ctx.eps), None, None


define_op(
    "vilonghorn::residual_norm_backward",
    "(Tensor dy, Tensor dx, Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
    cuda.norm_backward,
    lambda dy, dx, x, weight, eps: (torch.empty_like(x), torch.empty_like(weight)),
)


def validate_norm(args: NormArguments) -> None:
    """Checks shapes and devices of `rms_norm`."""
    x, weight, _ = args
    if x is None or weight is None:  # the dispatcher accepts None
        raise TypeError(f"rms_norm: x is {x}, weight is {weight}, expected two tensors")
    if x.dim() < 1 or weight.shape != x.shape[-1:]:
        shape, x_shape = tuple(weight.shape), tuple(x.shape)
        raise ValueError(f"rms_norm: weight has shape {shape}, expected the last dimension of x {x_shape}")
    if weight.device != x.device:
        raise ValueError(f"rms_norm: weight is on {weight.device} but x is on {x.device}; move them to one device")


def _fake(args: NormArguments, save: bool) -> tuple[Tensor, Tensor]:
    x, (*rows, _) = args.x, args.x.shape
    scale = x.new_empty(rows if save else 0, dtype=torch.promote_types(x.dtype, torch.float32))
    return x.new_empty(x.shape), scale


run_norm = register_op(
    "rms_norm_cpu",
    NormArguments,
    validate_norm,
    num_saved=1,
    forward=cpu.norm_forward,
    fake=_fake,
    backward=lambda dy, saved, args, wanted: cpu.norm_backward(dy, args, *saved),
)

# A composite operator: torch.fx and TorchScript see one call, autograd and compilers see what it runs.
torch.library.define("vilonghorn::rms_norm", "(Tensor x, Tensor weight, float eps=1e-5) -> Tensor")
torch.library.impl("vilonghorn::rms_norm", "CompositeImplicitAutograd", rms_norm)
