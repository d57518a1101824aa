"""`block`: a residual block as one operator on a CPU with the native library: norm, mixer, and perhaps a gated MLP.

One call replaces a dozen, and what lies between their products stays in the cache.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ._torch import autocast_dtype
from .arguments import BlockArguments, MixerWeights, MlpWeights
from .backends import cpu
from .register import register_op
from .validate import check_flags, flatten_weights, validate_block


def block(
    x: Tensor,
    norm_weight: Tensor,
    in_proj: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor,
    x_proj: Tensor | None,
    dt_proj: Tensor | None,
    dt_bias: Tensor | None,
    A: Tensor | None,
    D: Tensor | None,
    out_proj: Tensor,
    mlp_norm_weight: Tensor | None = None,
    mlp_in_proj: Tensor | None = None,
    mlp_out_proj: Tensor | None = None,
    drop_scales: Tensor | None = None,
    *,
    rule: str = "longhorn",
    reverse: Sequence[bool] = (False, True),
    eps: float = 1e-5,
    mlp_eps: float = 1e-5,
    grid: Sequence[int] | None = None,
) -> Tensor:
    """Adds the branch of a mixer to x, then that of an MLP, if its weights are given.

    The first branch is `mamba_inner`(`rms_norm`(x, norm_weight, eps) in_proj^T, ...) out_proj^T. The second is
    (silu(g) * v) mlp_out_proj^T with (g, v) = `rms_norm`(x, mlp_norm_weight, mlp_eps) mlp_in_proj^T (SwiGLU, Shazeer,
    arXiv 2002.05202).

    All tensors are float32 on the CPU: x, (B, L, dim), which is the result's shape too; norm_weight, (dim,); in_proj,
    (2D, dim); out_proj, (dim, D); conv_weight to D, rule, reverse and grid are as in `mamba_inner` with separate
    directions. An MLP has mlp_norm_weight, (dim,); mlp_in_proj, (2M, dim), rows of g, then v; mlp_out_proj, (dim, M).
    drop_scales, (1, B), with an MLP (2, B), are factors of each sample's branches: stochastic depth (default: 1).

    Under autocast to bfloat16, the products of linear layers are of bfloat16 values, summed in float32, where the
    processor has AMX. Without autocast `torch.set_float32_matmul_precision` chooses (docs/performance.md).

    Raises:
        ValueError: shapes, devices or a rule that do not fit, or no tokens.
        TypeError: a dtype other than float32, weights that are missing, or flags other than True and False.
        RuntimeError: the native library is not built, or has no kernel for the rule.
    """
    given = (mlp_norm_weight, mlp_in_proj, mlp_out_proj)
    mlp = None if all(weight is None for weight in given) else MlpWeights(*given)  # type: ignore[arg-type]
    weights = MixerWeights(conv_weight, conv_bias, x_proj, dt_proj, dt_bias, A, D)
    weights, conv_grid = flatten_weights("block", weights, grid)
    tensors = (x, norm_weight, in_proj, weights, out_proj, mlp, drop_scales)
    options = (rule, check_flags("block", reverse), eps, mlp_eps, autocast_dtype(x) == torch.bfloat16, conv_grid)
    return run_block(BlockArguments(*tensors, *options))


run_block = register_op(
    "block",
    BlockArguments,
    validate_block,
    num_saved=5,
    forward=cpu.block_forward,
    fake=cpu.block_outputs,
    backward=cpu.block_backward,
)
