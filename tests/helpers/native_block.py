"""The block and the mixer of a backend as functions that autograd differentiates, and both in float64."""

import torch
from oracle import block_inputs, convolution, gated_mlp, grid_convolution, mixer, mlp_inputs, rms_norm
from torch import Tensor

from vilonghorn.ops.arguments import BlockArguments, MambaInnerArguments
from vilonghorn.ops.backends import cpu

RULES = ("longhorn", "longhorn_exact", "mamba", "none")
RECURRENT = ("x_proj", "dt_proj", "dt_bias", "D")  # weights that rule "none" does not have


def differentiable(arguments: type, num_tensors: int, forward, backward):
    """A function of tensors and options by name, with the gradient that a backend computes."""
    names = arguments._fields[:num_tensors]

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, options, *tensors):
            args = arguments(*tensors, **options)
            y, *ctx.kept = forward(args, True)
            ctx.args = args
            assert torch.equal(forward(args, False)[0], y)
            return y

        @staticmethod
        def backward(ctx, dy):
            wanted = [int(needed) for needed in ctx.needs_input_grad[1:]]
            return None, *backward(dy, ctx.kept, ctx.args, wanted)

    def run(**given):
        tensors = [given.pop(name, None) for name in names]
        return Function.apply(given, *tensors)

    return run


block = differentiable(BlockArguments, 15, cpu.block_forward, cpu.block_backward)
mamba_inner = differentiable(
    MambaInnerArguments,
    8,
    cpu.mamba_inner_forward,
    lambda dy, saved, args, wanted: cpu.mamba_inner_backward(dy, args, *saved),
)


def mamba_inner_truth(
    xz, conv_weight, conv_bias, *, rule, reverse, conv_grid=(), dt_proj=None, dt_bias=None, **weights
):
    """`mamba_inner` in float64, for any number of heads, or with rule "none"."""
    grid = conv_grid[:2] or None
    conv_weight = conv_weight.unflatten(2, tuple(conv_grid[2:])) if conv_grid else conv_weight
    if rule != "none":
        repeats = conv_weight.shape[1] // dt_proj.shape[1]
        weights |= dict(dt_proj=dt_proj.repeat_interleave(repeats, 1), dt_bias=dt_bias.repeat_interleave(repeats, 1))
        return mixer(xz, conv_weight, conv_bias, **weights, rule=rule, reverse=reverse, grid=grid)
    x, z = xz.double().chunk(2, -1)
    u = grid_convolution(x, conv_weight, conv_bias, grid) if grid else convolution(x, conv_weight, conv_bias, reverse)
    return u.mean(0) * z / (1 + torch.exp(-z))


def block_truth(
    x,
    norm_weight,
    in_proj,
    out_proj,
    *,
    eps,
    mlp_eps,
    bf16,
    mlp_norm_weight=None,
    mlp_in_proj=None,
    mlp_out_proj=None,
    drop_scales=None,
    **inner,
):
    """`BlockArguments` in float64."""
    x = x.double()
    scales = x.new_ones(2, len(x)) if drop_scales is None else drop_scales.detach().double()
    y = mamba_inner_truth(rms_norm(x, norm_weight, eps) @ in_proj.double().mT, **inner)
    x = x + scales[0, :, None, None] * (y @ out_proj.double().mT)
    if mlp_out_proj is None:
        return x
    branch = gated_mlp(x, mlp_norm_weight, mlp_in_proj, mlp_out_proj, eps=mlp_eps, residual=False)
    return x + scales[1, :, None, None] * branch


def inputs(shape, heads: int, hidden: int, rule: str, conv_grid=(), seed: int = 0) -> tuple[dict[str, Tensor], dict]:
    """Random tensors of a block of that shape (G, B, L, D, N, R, K, dim), by name, and its options."""
    values = block_inputs(*shape, rule=rule, seed=seed)
    values |= {name: values[name][:, :heads].contiguous() for name in ("dt_proj", "dt_bias")}
    if rule == "none":
        values = {name: value for name, value in values.items() if name not in RECURRENT}
    if hidden:
        mlp = mlp_inputs(*shape[1:3], shape[-1], hidden=hidden, seed=seed)
        values |= {f"mlp_{name}": value for name, value in mlp.items() if name != "x"}
    reverse = [False, True, True][: shape[0]]
    return values, dict(rule=rule, reverse=reverse, eps=1e-5, mlp_eps=0.1, bf16=False, conv_grid=list(conv_grid))
