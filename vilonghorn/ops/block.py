"""`block`: a whole residual block as one operator, on a CPU with the native library.

One call replaces a dozen, and neither the normalised tokens nor the branch need memory of their own.
"""

import platform
from collections.abc import Sequence

import torch
from torch import Tensor

from .backends import cpu
from .register import native_export, register_op
from .validate import BlockArguments, autocast_dtype, check_flags, validate_block, with_grid

X86 = platform.machine().lower() in ("x86_64", "amd64")


def block(
    x: Tensor,
    norm_weight: Tensor,
    in_proj: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor,
    x_proj: Tensor,
    dt_proj: Tensor,
    dt_bias: Tensor,
    A: Tensor | None,
    D: Tensor,
    out_proj: Tensor,
    *,
    rule: str = "longhorn",
    reverse: Sequence[bool] = (False, True),
    eps: float = 1e-5,
    grid: Sequence[int] | None = None,
) -> Tensor:
    """Returns x + branch, branch = `mamba_inner`(`rms_norm`(x, norm_weight, eps) in_proj^T, ...) out_proj^T.

    Args:
        x: tokens, (B, L, dim), float32 on the CPU like all tensors here.
        norm_weight: (dim,).
        in_proj: (2D, dim).
        conv_weight: as the following ones, in `mamba_inner` with separate directions.
        conv_bias: (G, D).
        x_proj: (G, R + 2N, D).
        dt_proj: (G, D, R).
        dt_bias: (G, D).
        A: (G, D, N), for rule "mamba" only, else None.
        D: (G, D).
        out_proj: (dim, D).
        rule: as in `mamba_inner`.
        reverse: as in `mamba_inner`.
        eps: added to the mean square.
        grid: as in `mamba_inner`.

    Under autocast to bfloat16, in_proj and out_proj are products of bfloat16 values, summed in float32, where the
    processor has AMX. Without autocast `torch.set_float32_matmul_precision` chooses, see `vilonghorn.ops.backends.cpu`.

    Returns:
        (B, L, dim).

    Raises:
        ValueError: shapes, devices or a rule that do not fit, or no tokens.
        TypeError: a dtype other than float32, or flags other than True and False.
        RuntimeError: the native library is not built.
    """
    filters, grid_options = with_grid("block", conv_weight, grid)
    tensors = (x, norm_weight, in_proj, filters, conv_bias, x_proj, dt_proj, dt_bias, A, D, out_proj)
    form = (check_flags("block", reverse), float(eps), 0.0, autocast_dtype(x) == torch.bfloat16, grid_options)
    return _run(BlockArguments(*tensors, None, None, None, None, rule, *form))


def has_fast_block() -> bool:
    """Whether `block` runs here and is faster than its parts. On other processors torch's products are faster."""
    return X86 and cpu.unavailable("cpu") is None


def prefers_block(x: Tensor) -> bool:
    """Whether `block` takes the tokens x, and is faster than its parts."""
    return (
        (has_fast_block() or native_export.is_on)
        and are_float32_on_cpu((x,))
        and x.numel() > 0
        and ((short := autocast_dtype(x)) is None or short == torch.bfloat16 and cpu.has_bf16_products())
    )


def are_float32_on_cpu(tensors: Sequence[Tensor | None]) -> bool:
    """Whether all tensors are float32 and on the CPU, as `block` needs them. None counts as such a tensor."""
    return all([t is None or t.is_cpu and t.dtype == torch.float32 for t in tensors])


def _fake(args: BlockArguments, save: bool) -> tuple[Tensor, ...]:
    G, B, L, D, N, _, R = sizes = args.sizes
    hidden = 0 if args.mlp_out_proj is None else args.mlp_out_proj.shape[1]
    shapes = (B, L, 2 * D), (G, B, L, R + 2 * N), (sizes.num_saved_states(cpu.CHUNK, cpu.LANES),)
    shapes += (tuple(args.x.shape), (B, L, 2 * hidden)) if hidden else ((0,), (0,))
    return args.x.new_empty(args.x.shape), *(args.x.new_empty(shape if save else 0) for shape in shapes)


_run = register_op(
    "block",
    BlockArguments,
    validate_block,
    num_saved=5,
    forward=cpu.block_forward,
    fake=_fake,
    backward=cpu.block_backward,
)
