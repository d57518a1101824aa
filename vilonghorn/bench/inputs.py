"""Random arguments of a scan, and its value with all gradients: what the checks and the timings of the scan share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def random_inputs(
    G: int,
    B: int,
    L: int,
    D: int,
    N: int,
    *,
    rule: str,
    dtype: torch.dtype,
    generator: torch.Generator,
    gate: bool = True,
    skip: bool = True,
    sliced: bool = False,
) -> dict[str, Tensor]:
    """Draws arguments of `vilonghorn.ops.scan` on the generator's device.

    Args:
        G, B, L, D, N: directions, batch, tokens, channels, state size.
        rule: "mamba" adds A.
        dtype: of activations; A, D and dt_bias are float32, as under autocast.
        generator: what draws them.
        gate: add z.
        skip: add D and dt_bias.
        sliced: k and q are slices of one tensor, as they come from a projection.
    """

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=generator.device)

    values = dict(x=normal(G, B, L, D), dt=normal(G, B, L, D) - 1, k=normal(G, B, L, N), q=normal(G, B, L, N) / 2)
    if sliced:
        values["k"], values["q"] = torch.cat([values["k"], values["q"]], -1).to(dtype).chunk(2, -1)
    if gate:
        values["z"] = normal(B, L, D)
    values = {name: value.to(dtype) for name, value in values.items()}
    if skip:
        values |= dict(D=normal(G, D), dt_bias=normal(G, D))
    if rule == "mamba":
        values["A"] = -4 * torch.rand(G, D, N, generator=generator, device=generator.device)
    return values


def value_and_gradients(
    function: Callable[..., Tensor], values: dict[str, Tensor], cotangent: Tensor
) -> dict[str, Tensor]:
    """y = function(**values) under "y", and for each value the gradient of sum(y * cotangent) under its name."""
    leaves = {name: value.detach().requires_grad_() for name, value in values.items()}
    y = function(**leaves)
    return {"y": y.detach(), **dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), cotangent)))}


def output_shape(values: dict[str, Tensor], reduce: str) -> tuple[int, ...]:
    """Shape of a scan's result."""
    return tuple(values["x"].shape[1:] if reduce == "mean" else values["x"].shape)
