"""Times whole models on a device with equal flags, and profiles one block."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from vilonghorn.layers import Block

from .device import call_times
from .report import table
from .tasks import Outcome

NAMES = ("deit_tiny_patch16_224", "vilonghorn_tiny", "vilonghorn_tiny_exact", "vim_tiny")  # ratios are to the first
SIZES = (224, 384, 512, 768, 1024)  # pixels
USUAL = 512  # pixels, up to which sizes are usual
TOKENS = 128 * 196  # patches a batch, about: the larger the images, the fewer
MEMORY = 12e9  # bytes that a model may hold while its backward is compiled
Cell = tuple[int, bool]  # pixels, and whether gradients are taken


@dataclass
class ModelTask:
    """One model in some cells, eager or compiled."""

    device: str
    name: str
    cells: Sequence[Cell]
    compiled: bool
    batch: int | None = None  # default: by size
    steps: dict[Cell, Callable[[], None]] = field(default_factory=dict, repr=False)

    @property
    def title(self) -> str:
        sizes = ", ".join(f"{size} px {'train' if train else 'inference'}" for size, train in self.cells)
        return f"{self.name}, {'compiled' if self.compiled else 'eager'}, {sizes}"

    @property
    def seconds(self) -> float:
        return 1.5 * len(self.cells)

    def prepare(self) -> None:
        """Compiles."""
        if self.compiled:
            for size, train in self.cells:
                self.steps[size, train] = self._step(size, train)
                self.steps[size, train]()
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def measure(self) -> list[dict[str, Any]]:
        rows = []
        for size, train in self.cells:
            row = dict(model=self.name, size=size, train=train, compiled=self.compiled, batch=self._batch(size))
            try:
                row |= self._figures(size, train)
            except torch.OutOfMemoryError:
                row["problem"] = "out of memory"
            rows.append(row)
            if self.device == "cuda":
                torch.cuda.empty_cache()
        return rows

    def _figures(self, size: int, train: bool) -> dict[str, Any]:
        step = self.steps.pop((size, train), None) or self._step(size, train)
        if self.device == "cuda":
            step()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        times = call_times(step, self.device)
        memory = torch.cuda.max_memory_allocated() / 1e9 if self.device == "cuda" else None
        return dict(ms=times, images_per_s=self._batch(size) / statistics.median(times) * 1e3, memory_gb=memory)

    def _batch(self, size: int) -> int:
        return self.batch or max(1, TOKENS // (size // 16) ** 2)

    def _step(self, size: int, train: bool) -> Callable[[], None]:
        """Forward without gradients, or forward, loss and backward; bfloat16 autocast."""
        model = timm.create_model(self.name, img_size=size).to(self.device).train(train)
        network = torch.compile(model) if self.compiled else model
        images = torch.randn(self._batch(size), 3, size, size, device=self.device)
        targets = torch.randint(model.num_classes, (len(images),), device=self.device)

        def infer() -> None:
            with torch.no_grad(), torch.autocast(self.device, torch.bfloat16):
                network(images)

        def learn() -> None:
            with torch.autocast(self.device, torch.bfloat16):
                loss = F.cross_entropy(network(images), targets)
            loss.backward()
            model.zero_grad()

        return learn if train else infer


def model_tasks(device: str, sizes: Sequence[int], batch: int | None) -> list[list[ModelTask]]:
    """Tasks by importance: compiled training at the usual sizes; everything eager, a model each; the rest compiled."""
    first = [(size, True) for size in sizes if size <= USUAL]
    rest = [(size, False) for size in sizes if size <= USUAL]
    rest += [(size, train) for size in sizes if size > USUAL for train in (True, False)]
    eager = [ModelTask(device, name, sorted(first + rest), False, batch) for name in NAMES]
    compiled = ([ModelTask(device, name, [cell], True, batch) for cell in c for name in NAMES] for c in (first, rest))
    return [next(compiled), eager, next(compiled)]


def at_once(device: str) -> int:
    """How many models the device has memory for."""
    return max(1, int(torch.cuda.get_device_properties(device).total_memory // MEMORY))


def report_models(outcomes: Sequence[Outcome]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Prints a table for each cell; returns the tables and the rows behind them as plain data."""
    rows = [row for outcome in outcomes for row in outcome.rows]
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        groups.setdefault((row["compiled"], not row["train"], row["size"], row["batch"]), []).append(row)
    tables = []
    for (compiled, inference, size, batch), group in sorted(groups.items()):
        title = f"model, {'inference' if inference else 'training step'}, {'compiled' if compiled else 'eager'}, "
        title += f"batch {batch}, {size} px bfloat16 autocast"
        measured = [row for row in sorted(group, key=lambda row: NAMES.index(row["model"])) if "ms" in row]
        columns = [{"images/s": row["images_per_s"], "GB": row["memory_gb"]} for row in measured]
        extra = {row["model"]: {n: v for n, v in c.items() if v is not None} for row, c in zip(measured, columns)}
        if measured:
            tables.append(table(title, {r["model"]: [ms / 1e3 for ms in r["ms"]] for r in measured}, extra=extra))
        for row in group:
            if "problem" in row:
                print(f"  {row['model']:28} {size} px: {row['problem']}")
    return tables, rows


@dataclass
class BlockTask:
    """Profiles forward and backward of one block of the tiny models, at 224 px."""

    device: str
    rule: str
    compiled: bool
    batch: int = 128
    dim: int = 192
    tokens: int = 197
    repeats: int = 5
    seconds: float = 3

    @property
    def title(self) -> str:
        form = "compiled" if self.compiled else "eager"
        return f"block {self.rule}, {form}, B={self.batch} L={self.tokens} width {self.dim}, bfloat16 autocast"

    def prepare(self) -> None:
        block = Block(self.dim, rule=self.rule, device=self.device)
        network = torch.compile(block) if self.compiled else block
        x = torch.randn(self.batch, self.tokens, self.dim, device=self.device, requires_grad=True)
        dy = torch.randn_like(x)

        def step() -> None:
            with torch.autocast(self.device, torch.bfloat16):
                y = network(x)
            torch.autograd.grad(y, [x, *block.parameters()], dy)

        self.step = step
        for _ in range(3):
            step()

    def measure(self) -> list[dict[str, Any]]:
        """Kernels (on a CPU, operators) by their own time in one step."""
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.device == "cuda" else [])]
        with profile(activities=activities) as profiler:
            for _ in range(self.repeats):
                self.step()
            if self.device == "cuda":
                torch.cuda.synchronize()
        return kernels(profiler.key_averages(), self.device, self.repeats)


def kernels(events, device: str, repeats: int) -> list[dict[str, Any]]:
    """Events of the device by their own time, in microseconds a step."""
    wanted, attribute = (
        (DeviceType.CUDA, "self_device_time_total") if device == "cuda" else (DeviceType.CPU, "self_cpu_time_total")
    )
    rows = [
        dict(kernel=event.key, calls=event.count / repeats, us=getattr(event, attribute) / repeats)
        for event in events
        if event.device_type == wanted and getattr(event, attribute) > 0
    ]
    return sorted(rows, key=lambda row: -row["us"])


def report_blocks(outcomes: Sequence[Outcome], most: int = 15) -> list[dict[str, Any]]:
    """Prints the `most` expensive kernels of each profile; returns all of them."""
    profiles = []
    for outcome in outcomes:
        if not outcome.rows:
            continue
        total = sum(row["us"] for row in outcome.rows)
        print(f"\n{outcome.task.title}: {total:.0f} us a step\n  {'us':>9}{'share':>8}{'calls':>7}   kernel")
        for row in outcome.rows[:most]:
            print(f"  {row['us']:9.1f}{row['us'] / total:8.1%}{row['calls']:7.1f}   {row['kernel'][:90]}")
        profiles.append(dict(title=outcome.task.title, us=total, kernels=outcome.rows))
    return profiles
