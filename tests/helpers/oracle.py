"""The scan, and the mixer around it, from textbook equations in float64, one direction at a time, for autograd to
differentiate. Shares no code with the package: sigmoid, softplus, padding and flips where the package has none.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

KERNEL_RULES = ("longhorn", "longhorn_exact", "mamba")  # that every backend runs


def oracle(
    x,
    dt,
    k,
    q,
    *,
    z=None,
    A=None,
    D=None,
    dt_bias=None,
    initial_state=None,
    return_state=False,
    rule="longhorn",
    reverse=(False,),
    reduce="none",
):
    """Arguments as `vilonghorn.ops.scan`; the results are float64."""
    x, dt, k, q, z, A, D, dt_bias = (None if t is None else t.double() for t in (x, dt, k, q, z, A, D, dt_bias))
    outputs, states = [], []
    for g, flag in enumerate(reverse):
        order = (lambda t: t.flip(1)) if flag else (lambda t: t)
        step = order(dt[g]) if dt_bias is None else order(dt[g]) + dt_bias[g]
        start = x.new_zeros(*x.shape[1::2], k.shape[-1]) if initial_state is None else initial_state[g].double().mT
        y, state = _one_direction(start, order(x[g]), step, order(k[g]), order(q[g]), None if A is None else A[g], rule)
        states.append(state.mT)
        if D is not None:
            y = y + D[g] * order(x[g])
        outputs.append(order(y))
    y = torch.stack(outputs)
    if reduce == "mean":
        y = y.sum(0) / len(reverse)
    y = y if z is None else y * z / (1 + torch.exp(-z))
    return (y, torch.stack(states)) if return_state else y


def _one_direction(
    state: Tensor, x: Tensor, dt: Tensor, k: Tensor, q: Tensor, A: Tensor | None, rule: str
) -> tuple[Tensor, Tensor]:
    length = x.shape[1]
    beta, delta = torch.sigmoid(dt), torch.nn.functional.softplus(dt)
    eps = beta / (1 + beta * (k * k).sum(-1, keepdim=True))
    outputs = []
    for t in range(length):
        if rule == "longhorn":
            erase = torch.einsum("bd,bn->bdn", eps[:, t], k[:, t] ** 2)
            state = (1 - erase) * state + torch.einsum("bd,bn->bdn", eps[:, t] * x[:, t], k[:, t])
        elif rule == "longhorn_exact":
            recalled = torch.einsum("bdn,bn->bd", state, k[:, t])
            state = state + torch.einsum("bd,bn->bdn", eps[:, t] * (x[:, t] - recalled), k[:, t])
        else:
            decay = torch.exp(delta[:, t, :, None] * A)
            state = decay * state + torch.einsum("bd,bn->bdn", delta[:, t] * x[:, t], k[:, t])
        outputs.append(torch.einsum("bdn,bn->bd", state, q[:, t]))
    return torch.stack(outputs, 1), state


def convolution(x, weight, bias, reverse):
    """nn.Conv1d as Vim uses it, with SiLU: padded, cut to L, on the flipped sequence for a reverse direction."""
    x, weight, bias = x.double(), weight.double(), bias.double()
    outputs = []
    for w, b, flag in zip(weight, bias, reverse):
        source = x.flip(1) if flag else x
        y = F.conv1d(source.mT, w.unsqueeze(1), b, padding=w.shape[1] - 1, groups=len(w))[..., : x.shape[1]].mT
        outputs.append(F.silu(y.flip(1) if flag else y))
    return torch.stack(outputs)


def grid_convolution(x, weight, bias, grid):
    """F.conv2d over the patches, with SiLU. A class token in their middle sees the middle of the filter only."""
    x, weight, bias, (height, width) = x.double(), weight.double(), bias.double(), weight.shape[2:]
    patches = grid[0] * grid[1]
    places = torch.tensor([t for t in range(x.shape[1]) if x.shape[1] == patches or t != patches // 2])
    maps = x[:, places].mT.unflatten(2, tuple(grid))
    outputs = []
    for w, b in zip(weight, bias):
        y = F.conv2d(maps, w[:, None], b, padding=(height // 2, width // 2), groups=len(w)).flatten(2).mT
        alone = x * w[:, height // 2, width // 2] + b
        outputs.append(F.silu(alone.index_copy(1, places, y)))
    return torch.stack(outputs)


def conv_inputs(G, B, L, D, K, dtype=torch.float32) -> dict[str, Tensor]:
    """Random arguments of a convolution."""
    generator = torch.Generator().manual_seed(0)
    shapes = dict(x=(B, L, D), weight=(G, D, K), bias=(G, D))
    return {n: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for n, shape in shapes.items()}


def mixer(
    xz, conv_weight, conv_bias, x_proj=None, dt_proj=None, dt_bias=None, D=None, A=None, *, rule, reverse, grid=None
):
    """Arguments as `vilonghorn.ops.mamba_inner`; the result is float64."""
    x, z = xz.double().split(xz.shape[-1] // 2, dim=-1)
    on_grid = conv_weight.dim() == 4
    u = (grid_convolution if on_grid else convolution)(x, conv_weight, conv_bias, grid if on_grid else reverse)
    if rule == "none":
        return u.sum(0) / len(reverse) * z / (1 + torch.exp(-z))
    rank, share = dt_proj.shape[-1], u.shape[-1] // dt_proj.shape[1]
    states = (x_proj.shape[1] - rank) // 2
    projected = torch.einsum("gbld,gpd->gblp", u, x_proj.double())
    low, k, q = projected[..., :rank], projected[..., rank : rank + states], projected[..., rank + states :]
    dt_proj, dt_bias = (t.repeat_interleave(share, 1) for t in (dt_proj, dt_bias))  # one step for a head
    dt = torch.einsum("gblr,gdr->gbld", low, dt_proj.double())
    return oracle(u, dt, k, q, z=z, A=A, D=D, dt_bias=dt_bias, rule=rule, reverse=reverse, reduce="mean")


def mixer_inputs(
    G, B, L, D, N, R, K, *, rule, heads=None, filters=None, seed=0, dtype=torch.float32
) -> dict[str, Tensor]:
    """Random arguments of a mixer, scaled as its initialisation does. `filters`: the size of one over the grid."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    H = heads or D
    values = dict(xz=normal(B, L, 2 * D), conv_weight=normal(G, D, K) * K**-0.5, conv_bias=normal(G, D) / 4)
    if rule != "none":
        values |= dict(
            x_proj=normal(G, R + 2 * N, D) * 2 * D**-0.5,
            dt_proj=normal(G, H, R) * R**-0.5,
            dt_bias=normal(G, H),
            D=normal(G, D),
        )
    if rule == "mamba":
        values["A"] = -4 * torch.rand(G, D, N, generator=generator, dtype=torch.float64)
    if filters is not None:
        values["conv_weight"] = values["conv_weight"].unflatten(2, filters)
    return {name: value.to(dtype) for name, value in values.items()}


def rms_norm(x, weight, eps):
    """x, float64, normed over its last dimension."""
    return x * weight.double() / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def residual_block(
    x,
    norm_weight,
    in_proj,
    out_proj,
    mlp_norm_weight=None,
    mlp_in_proj=None,
    mlp_out_proj=None,
    *,
    drop_scales=None,
    eps=1e-5,
    mlp_eps=1e-5,
    **inner,
):
    """Arguments as `vilonghorn.ops.block`; the result is float64."""
    x, out_proj = x.double(), out_proj.double()
    scales = [1.0, 1.0] if drop_scales is None else drop_scales.double()[:, :, None, None]
    x = x + scales[0] * mixer(rms_norm(x, norm_weight, eps) @ in_proj.double().mT, **inner) @ out_proj.mT
    if mlp_in_proj is None:
        return x
    gate, value = (rms_norm(x, mlp_norm_weight, mlp_eps) @ mlp_in_proj.double().mT).chunk(2, -1)
    return x + scales[1] * (gate / (1 + torch.exp(-gate)) * value) @ mlp_out_proj.double().mT


def block_inputs(
    G, B, L, D, N, R, K, dim, *, hidden=0, rule="longhorn", heads=None, filters=None, seed=0, dtype=torch.float32
) -> dict[str, Tensor]:
    """Random arguments of a residual block, scaled as its initialisation does; with an MLP if `hidden` is not 0."""
    generator = torch.Generator().manual_seed(seed + 1)
    options = dict(rule=rule, heads=heads, filters=filters, seed=seed, dtype=torch.float64)
    values = mixer_inputs(G, B, L, D, N, R, K, **options)
    del values["xz"]

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    values |= dict(x=normal(B, L, dim), norm_weight=1 + normal(dim) / 4)
    values |= dict(in_proj=normal(2 * D, dim) * dim**-0.5, out_proj=normal(dim, D) * D**-0.5)
    if hidden:
        values |= dict(
            mlp_norm_weight=1 + normal(dim) / 4,
            mlp_in_proj=normal(2 * hidden, dim) * dim**-0.5,
            mlp_out_proj=normal(dim, hidden) * hidden**-0.5,
        )
    return {name: value.to(dtype) for name, value in values.items()}


def inputs(
    G, B, L, D, N, *, rule, gate=True, state=False, seed=0, dtype=torch.float32, key_scale=1.0
) -> dict[str, Tensor]:
    """Random arguments of a scan; A, z, D, dt_bias and a float32 state where the rule, `gate` and `state` have them."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    values = dict(
        x=normal(G, B, L, D), dt=normal(G, B, L, D) - 1, k=normal(G, B, L, N) * key_scale, q=normal(G, B, L, N) / 2
    )
    if gate:
        values |= dict(z=normal(B, L, D), D=normal(G, D), dt_bias=normal(G, D))
    if rule == "mamba":
        values["A"] = -4 * torch.rand(G, D, N, generator=generator, dtype=torch.float64)
    values = {name: value.to(dtype) for name, value in values.items()}
    if state:
        values["initial_state"] = normal(G, B, N, D).to(torch.promote_types(dtype, torch.float32))
    return values


def heads_inputs(G, B, L, D, N, heads, **options) -> dict[str, Tensor]:
    """Random arguments of a scan with one dt for a head; options as of `inputs`."""
    values = inputs(G, B, L, D, N, rule="longhorn_exact", **options)
    return {n: v[..., :heads] if n in ("dt", "dt_bias") else v for n, v in values.items() if n != "z"}


def heads_oracle(x, dt, k, q, *, dt_bias=None, rule="longhorn_exact", **options):
    """Arguments as `oracle`, with a dt for each head."""
    dt, dt_bias = (None if t is None else t.repeat_interleave(x.shape[-1] // t.shape[-1], -1) for t in (dt, dt_bias))
    return oracle(x, dt, k, q, dt_bias=dt_bias, rule=rule, **options)


def flags(G: int) -> tuple[bool, ...]:
    """Of up to three directions, which of them are reversed."""
    return (False, True, True)[:G]


def value_and_grads(function, values: dict[str, Tensor], keep_strides: bool = False, **options) -> dict[str, Tensor]:
    """y, a state and the gradient of every input for fixed random cotangents, by name, in float64."""
    copies = (value.detach() if keep_strides else value.detach().clone() for value in values.values())
    leaves = {name: copy.requires_grad_() for name, copy in zip(values, copies)}
    results = function(**leaves, **options)
    outputs, generator = results if isinstance(results, tuple) else (results,), torch.Generator().manual_seed(1)
    cotangents = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t) for t in outputs]
    torch.autograd.backward(outputs, cotangents)
    named = {name: t.detach().double() for name, t in zip(("y", "state"), outputs)}
    return named | {name: leaf.grad.double() for name, leaf in leaves.items()}


def error(actual: Tensor, expected: Tensor) -> float:
    """Relative error in the 2-norm; NaN counts as infinite."""
    if actual.isnan().any():
        return float("inf")
    return ((actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)).item()


def compare(
    function, values: dict[str, Tensor], tolerance: float, device: str = "cpu", truth=oracle, **options
) -> None:
    """Holds y and every gradient of `function`, run on `device`, to those of the oracle, or of another truth."""
    expected = value_and_grads(truth, {name: value.double() for name, value in values.items()}, **options)
    actual = value_and_grads(function, {name: value.to(device) for name, value in values.items()}, **options)
    wrong = {name: error(actual[name].cpu(), expected[name]) for name in expected}
    assert max(wrong.values()) < tolerance, {name: f"{e:.1e}" for name, e in wrong.items()}
