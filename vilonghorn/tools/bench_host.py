"""Times the scan against loops in plain torch, and the models against timm's DeiT, on a CPU.

Contenders of a table take turns in one process, so that whatever disturbs the machine disturbs them all; a figure is
the median over rounds, and ratios are to the table's first contender.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import timm
import torch
import torch.nn.functional as F
from torch import Tensor

from vilonghorn.ops import backends, scan
from vilonghorn.ops.reference import scan_reference

Contenders = dict[str, Callable[[], object]]
SAMPLE_SECONDS = 0.02  # short calls are repeated until a sample takes this long


def torch_loop(x, dt, k, q, z=None, A=None, D=None, dt_bias=None, *, rule: str) -> Tensor:
    """One forward direction as it is usually written in torch: all coefficients first, then a loop over `unbind`.

    Arguments as `scan`, without groups. (Indexing `a[:, t]` instead of `unbind` is 20 times slower backward.)
    """
    dt = dt + dt_bias
    if rule == "mamba":
        step = F.softplus(dt)
        decay, update = torch.exp(step[..., None] * A), (step * x)[..., None] * k[:, :, None]
    else:
        gate = 1 / (1 + k.square().sum(-1, keepdim=True) + torch.exp(-dt))
        decay, update = 1 - gate[..., None] * k.square()[:, :, None], (gate * x)[..., None] * k[:, :, None]
    state, outputs = x.new_zeros(x.shape[0], x.shape[2], k.shape[-1]), []
    if rule == "longhorn_exact":
        for x_t, gate_t, k_t, q_t in zip(x.unbind(1), gate.unbind(1), k.unbind(1), q.unbind(1)):
            u = gate_t[..., None] * (x_t[..., None] - state @ k_t[..., None])
            state = torch.baddbmm(state, u, k_t[:, None])
            outputs.append((state @ q_t[..., None])[..., 0])
    else:
        for decay_t, update_t, q_t in zip(decay.unbind(1), update.unbind(1), q.unbind(1)):
            state = torch.addcmul(update_t, decay_t, state)
            outputs.append((state @ q_t[..., None])[..., 0])
    return (torch.stack(outputs, 1) + D * x) * F.silu(z)


def scan_contenders(rule: str, B: int, L: int, D: int, N: int, train: bool) -> Contenders:
    """The torch loop, the plain-torch reference and every backend that runs on a CPU here, for one direction."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, requires_grad=train)

    values = dict(x=normal(1, B, L, D), dt=normal(1, B, L, D), k=normal(1, B, L, N), q=normal(1, B, L, N))
    values |= dict(z=normal(B, L, D), D=normal(1, D), dt_bias=normal(1, D))
    if rule == "mamba":
        values["A"] = (-torch.rand(1, D, N)).requires_grad_(train)
    cotangent = torch.randn(1, B, L, D)

    def call(function: Callable[..., Tensor]) -> None:
        if not train:
            with torch.no_grad():
                function(**values)
            return
        y = function(**values)
        torch.autograd.grad(y, list(values.values()), cotangent.view_as(y))

    def loop(z: Tensor, **grouped: Tensor) -> Tensor:
        return torch_loop(z=z, **{name: value[0] for name, value in grouped.items()}, rule=rule)

    reference = partial(scan_reference, rule=rule)
    contenders = {"torch loop": partial(call, loop), "scan_reference": partial(call, reference)}
    for name, state in backends("cpu").items():
        if state == "ready":
            contenders[f"scan, backend {name}"] = partial(call, partial(scan, rule=rule, backend=name))
    return contenders


def model_contenders(names: tuple[str, ...], batch: int, size: int, train: bool) -> Contenders:
    """A forward pass of each model without gradients, or forward and backward."""
    images = torch.randn(batch, 3, size, size)

    def call(model: torch.nn.Module) -> None:
        if not train:
            with torch.no_grad():
                model(images)
            return
        model.zero_grad()
        model(images).sum().backward()

    return {name: partial(call, timm.create_model(name, img_size=size).train(train)) for name in names}


def measure(contenders: Contenders, rounds: int) -> dict[str, list[float]]:
    """Seconds a call, `rounds` samples of each contender, taken in turns."""
    repeats = {}
    for name, function in contenders.items():
        function()  # warm up: pages, caches, lazy initialisation
        start = time.perf_counter()
        function()
        repeats[name] = max(1, round(SAMPLE_SECONDS / (time.perf_counter() - start)))
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, function in contenders.items():
            start = time.perf_counter()
            for _ in range(repeats[name]):
                function()
            samples[name].append((time.perf_counter() - start) / repeats[name])
    return samples
