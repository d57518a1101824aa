"""`gated_mlp`: the MLP of a residual block with its norm as one operator, on a CPU with the native library.

It works on few rows at a time, so that what lies between its two products stays in the cache. What backward reads is
also written to memory.
"""

import torch
from torch import Tensor

from .backends import cpu
from .register import register_op
from .validate import MlpArguments, autocast_dtype, validate_gated_mlp


def gated_mlp(
    x: Tensor, norm_weight: Tensor, in_proj: Tensor, out_proj: Tensor, *, eps: float = 1e-5, residual: bool = True
) -> Tensor:
    """Returns x + (silu(g) * v) out_proj^T, (g, v) = `rms_norm`(x, norm_weight, eps) in_proj^T (SwiGLU, Shazeer, arXiv
    2002.05202).

    Args:
        x: tokens, (..., dim), float32 on the CPU like all tensors here.
        norm_weight: (dim,).
        in_proj: (2H, dim), rows of g, then v.
        out_proj: (dim, H).
        eps: added to the mean square.
        residual: whether x is added.

    Under autocast, and with `torch.set_float32_matmul_precision`, its products are those of `vilonghorn.ops.block`.

    Returns:
        As x.

    Raises:
        ValueError: shapes or devices that do not fit, or no tokens.
        TypeError: a dtype other than float32.
        RuntimeError: the native library is not built.
    """
    return _run(
        MlpArguments(x, norm_weight, in_proj, out_proj, float(eps), residual, autocast_dtype(x) == torch.bfloat16)
    )


def _fake(args: MlpArguments, save: bool) -> tuple[Tensor, Tensor]:
    gv = (*args.x.shape[:-1], args.in_proj.shape[0]) if save else 0
    return args.x.new_empty(args.x.shape), args.x.new_empty(gv)


_run = register_op(
    "gated_mlp",
    MlpArguments,
    validate_gated_mlp,
    num_saved=1,
    forward=cpu.gated_mlp_forward,
    fake=_fake,
    backward=cpu.gated_mlp_backward,
)
