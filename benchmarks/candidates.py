"""What models.py and scan.py time, and the models beside timm's DeiT."""

from collections.abc import Sequence
from functools import partial

import timm
import torch
import torch.nn.functional as F
from interleaved import STEPS, Factory, Row, Steps, run_interleaved

import vilonghorn  # noqa: F401  (registers the models with timm)

Candidate = tuple[Row, Factory]  # what names its rows, and its factory

# Each family is compared to its first member.
FAMILIES = (
    ("deit_tiny_patch16_224", "vilonghorn_tiny", "vilonghorn_tiny_exact", "vilonghornv2_tiny", "vim_tiny"),
    ("deit_small_patch16_224", "vilonghorn_small", "vilonghornv2_small"),
)
BATCH = {"cpu": 8, "cuda": 128}  # images of 224 px


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
    """A model of timm at random weights: inference, and a loss with its gradients.

    The name may end with "+channels_last", the memory format of weights and images.
    """
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest" if precision == "bf16" else precision)
    name, _, layout = model.partition("+")
    memory = {"": torch.contiguous_format, "channels_last": torch.channels_last}[layout]
    net = timm.create_model(name, img_size=size).to(device, memory_format=memory)
    images = torch.randn(batch, 3, size, size, device=device).to(memory_format=memory)
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
        stages = getattr(net, "stages", [net])
        parts = [block for stage in stages for block in stage.blocks]
        # All blocks share one `forward`. torch compiles it again for each step, size and rate of stochastic depth, by
        # default at most eight times.
        torch.compiler.config.recompile_limit = 8 * len(parts)
        parts += [net.stem, *(stage.downsample for stage in stages)] if hasattr(net, "stem") else []
        for part in parts:
            part.compile()
        for step in steps.values():
            step()
    return steps


def measure(cells: Sequence[Candidate], rounds: int, restarts: int, threads: int, device: str) -> list[Row]:
    """Times candidates by `run_interleaved`; a row of each for both steps."""
    made = {str(cell): factory for cell, factory in cells}
    steps = list(STEPS.values())
    found = run_interleaved(made, steps, rounds, threads=threads, device=device, restarts=restarts)
    return [cell | dict(train=train) | found[step][str(cell)] for train, step in STEPS.items() for cell, _ in cells]
