"""What `vilonghorn bench` times: the scan of every rule and backend, and models beside timm's DeiT."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import timm
import torch
import torch.nn.functional as F
from torch import Tensor

from .. import models  # noqa: F401  (registers them with timm)
from ..ops import backends, scan
from ..ops.rules import RULES
from .interleaved import STEPS, Factory, Row, Steps, run_interleaved

Candidate = tuple[Row, Factory]  # what names its rows, and its factory

# Each family is compared to its first member.
FAMILIES = (
    ("deit_tiny_patch16_224", "vilonghorn_tiny", "vilonghorn_tiny_exact", "vilonghornv2_tiny", "vim_tiny"),
    ("deit_small_patch16_224", "vilonghorn_small", "vilonghornv2_small"),
)
BATCH = {"cpu": 8, "cuda": 128}  # images of 224 px


class Workload(NamedTuple):
    """Sizes of a scan; each direction reads its own x."""

    B: int
    L: int
    D: int
    N: int
    G: int = 1


WORKLOADS = {"cpu": Workload(8, 197, 384, 16), "cuda": Workload(128, 197, 384, 16)}  # a tiny model at 224 px


def scan_candidates(device: str) -> list[Candidate]:
    """The scan of each rule by every backend that runs on a device, the reference first."""
    names = sorted((name for name, state in backends(device).items() if state == "ready"), key="reference".__ne__)
    return [
        (dict(rule=rule, backend=name), partial(scan_steps, rule, name, WORKLOADS[device], device))
        for rule in RULES
        for name in names
    ]


def scan_inputs(rule: str, workload: Workload, device: str) -> tuple[dict[str, Tensor], Tensor]:
    """Inputs of a scan with gate, skip and bias, and a gradient of its result: float32 on a CPU, else bfloat16."""
    B, L, D, N, G = workload
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    torch.manual_seed(0)
    with torch.device(device):
        x, dt, k, q = torch.randn(G, B, L, D), torch.randn(G, B, L, D) - 1, *torch.randn(2, G, B, L, N)
        inputs = {name: t.to(dtype) for name, t in dict(x=x, dt=dt, k=k, q=q / 2, z=torch.randn(B, L, D)).items()}
        inputs |= dict(D=torch.randn(G, D), dt_bias=torch.randn(G, D))  # parameters are float32
        if rule == "mamba":
            inputs["A"] = -4 * torch.rand(G, D, N)
        return inputs, torch.randn(*[G] * (G == 1), B, L, D).to(dtype)


def scan_steps(rule: str, backend: str, workload: Workload, device: str) -> Steps:
    """A scan by a backend of the library."""
    inputs, dy = scan_inputs(rule, workload, device)
    reverse, reduce = (False, True)[: workload.G], "none" if workload.G == 1 else "mean"
    return function_steps(partial(scan, rule=rule, reverse=reverse, reduce=reduce, backend=backend), inputs, dy)


def function_steps(function: Callable[..., Tensor], inputs: Mapping[str, Tensor], dy: Tensor) -> Steps:
    """A function of named tensors, and its gradients; on a GPU as CUDA graphs, which leave out the time of Python."""
    leaves = {name: value.clone().requires_grad_() for name, value in inputs.items()}

    def forward() -> Tensor:
        with torch.no_grad():
            return function(**inputs)

    def train() -> tuple[Tensor, ...]:
        return torch.autograd.grad(function(**leaves), list(leaves.values()), dy)

    steps = {STEPS[False]: forward, STEPS[True]: train}
    return {step: cuda_graph(call) for step, call in steps.items()} if dy.is_cuda else steps


def cuda_graph(call: Callable[[], object]) -> Callable[[], None]:
    """Captures a call as a CUDA graph; returns the replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # compile and warm up
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def model_candidates(
    names: Sequence[str], size: int, batch: int | None, precision: str, device: str, compiled: bool
) -> list[Candidate]:
    """Models for images of `size` pixels a side; by default as many images as have about the tokens of 8 of 224 px.

    On a GPU of 128. `precision` is "bf16", autocast to it, or the argument of `torch.set_float32_matmul_precision`.
    """
    batch = batch or max(1, round(BATCH[device] * 196 / (size // 16) ** 2))
    cells = [dict(model=name, size=size, batch=batch, precision=precision, compiled=compiled) for name in names]
    return [(cell, partial(model_steps, device=device, **cell)) for cell in cells]


def model_steps(model: str, size: int, batch: int, precision: str, device: str, compiled: bool) -> Steps:
    """A model of timm at random weights: inference, and a loss with its gradients."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest" if precision == "bf16" else precision)
    net = timm.create_model(model, img_size=size).to(device)
    images = torch.randn(batch, 3, size, size, device=device)
    targets = torch.randint(net.num_classes, (batch,), device=device)
    autocast = partial(torch.autocast, device, torch.bfloat16, enabled=precision == "bf16")

    def forward() -> None:
        net.eval()
        with torch.no_grad(), autocast():
            net(images)

    def train() -> None:
        net.train()
        with autocast():
            loss = F.cross_entropy(net(images), targets)
        loss.backward()
        net.zero_grad()

    steps = {STEPS[False]: forward, STEPS[True]: train}
    if compiled:  # block by block, because a model at once takes minutes; here, because all setups run at once
        for block in net.blocks:
            block.compile()
        for step in steps.values():
            step()
    return steps


def measure(cells: Sequence[Candidate], rounds: int, restarts: int, threads: int, device: str) -> list[Row]:
    """Times candidates by `run_interleaved`; a row of each for both steps."""
    made = {str(cell): factory for cell, factory in cells}
    steps = list(STEPS.values())
    found = run_interleaved(made, steps, rounds, threads=threads, device=device, restarts=restarts)
    return [cell | dict(train=train) | found[step][str(cell)] for train, step in STEPS.items() for cell, _ in cells]
