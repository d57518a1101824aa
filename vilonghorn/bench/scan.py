"""Times the scan on a device: every rule and backend, beside mamba_ssm's kernel where it is installed.

Figures are of the device's own time; "called" is that of calls as Python launches them. The floor is the time of what
must move through memory at least, at the rate of a copy.
"""

from __future__ import annotations

import importlib
import importlib.util
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vilonghorn.ops import scan
from vilonghorn.ops.backends import BACKENDS
from vilonghorn.ops.validate import RULES

from .device import cache_bytes, call_times, device_times
from .inputs import output_shape, random_inputs
from .report import table
from .tasks import Outcome

PEER = "mamba_ssm"
DTYPE = torch.bfloat16


class Workload(NamedTuple):
    """A scan to time."""

    title: str
    B: int
    L: int
    D: int
    N: int
    reverse: tuple[bool, ...]
    gate: bool


WORKLOADS = (
    Workload("two directions averaged, gated", 128, 197, 384, 16, (False, True), True),
    Workload("one direction, no gate", 128, 197, 384, 16, (False,), False),
    Workload("two directions averaged, gated", 1, 6084, 384, 16, (False, True), True),
)


@dataclass
class ScanTask:
    """All workloads of one backend and rule, forward alone and with backward."""

    device: str
    backend: str
    rule: str
    seed: int = 0
    seconds: float = 6

    @property
    def title(self) -> str:
        return f"{self.backend} {self.rule}"

    @property
    def required(self) -> bool:
        return self.backend != PEER

    def prepare(self) -> None:
        """Compiles what must be compiled."""
        for workload, train in cells():
            calls, _ = self._calls(workload, train, sets=1)
            calls[0]()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def measure(self) -> list[dict[str, Any]]:
        rows = []
        for workload, train in cells():
            calls, moved = self._calls(workload, train)
            rows.append(
                dict(
                    workload=workload._asdict(),
                    train=train,
                    backend=self.backend,
                    rule=self.rule,
                    bytes=moved,
                    device_ms=device_times(calls, self.device),
                    called_ms=call_times(calls[0], self.device),
                )
            )
        return rows

    def _calls(self, workload: Workload, train: bool, sets: int | None = None) -> tuple[list[Callable[[], None]], int]:
        """Calls on different inputs, three times as many bytes as the cache holds, and the bytes that one must move."""
        generator = torch.Generator(self.device).manual_seed(self.seed)
        calls: list[Callable[[], None]] = []
        while True:
            values, cotangent = draw(workload, self.rule, generator)
            prepare = peer_call if self.backend == PEER else partial(own_call, backend=self.backend)
            function, leaves, cotangents = prepare(values, cotangent, self.rule, workload.reverse)
            calls.append(partial(_call, function, leaves, cotangents, train))
            moved = bytes_moved(values, cotangent, train)
            if len(calls) >= (sets or max(2, -(-3 * cache_bytes(self.device) // moved))):
                return calls, moved


def cells() -> Iterator[tuple[Workload, bool]]:
    """Each workload, forward alone and with backward."""
    return ((workload, train) for workload in WORKLOADS for train in (False, True))


def scan_tasks(device: str) -> list[ScanTask]:
    """Every compiled backend that is ready on the device, in every rule; mamba_ssm where it is installed on a GPU."""
    ready = [name for name, b in BACKENDS.items() if name != "reference" and b.unavailable(device, DTYPE) is None]
    tasks = [ScanTask(device, name, rule) for name in ready for rule in RULES]
    if device == "cuda" and importlib.util.find_spec(PEER) is not None:
        tasks.append(ScanTask(device, PEER, "mamba"))
    return tasks


def draw(workload: Workload, rule: str, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """Inputs of a workload, and a gradient of its result."""
    _, B, L, D, N, reverse, gate = workload
    values = random_inputs(len(reverse), B, L, D, N, rule=rule, dtype=DTYPE, generator=generator, gate=gate)
    shape = output_shape(values, "mean")
    return values, torch.randn(shape, generator=generator, device=generator.device).to(DTYPE)


def bytes_moved(values: dict[str, Tensor], y: Tensor, train: bool) -> int:
    """Each input read once and each output written once: in backward, the inputs again, dy, and every gradient."""
    inputs = sum(value.numel() * value.element_size() for value in values.values())
    output = y.numel() * y.element_size()
    return inputs + output + (2 * inputs + output if train else 0)


def own_call(values: dict[str, Tensor], cotangent: Tensor, rule: str, reverse: tuple[bool, ...], backend: str):
    """Our scan as a function of leaves, those leaves, and the gradients of its results."""
    leaves = {name: value.requires_grad_() for name, value in values.items()}
    function = partial(scan, rule=rule, reverse=reverse, reduce="mean", backend=backend)
    return (lambda **leaves: [function(**leaves)]), leaves, [cotangent]


def peer_call(values: dict[str, Tensor], cotangent: Tensor, rule: str, reverse: tuple[bool, ...]):
    """The same arithmetic by mamba_ssm: one call a direction, in its own layout (B, D, L), made beforehand.

    Neither the flips that its reverse directions need nor the sum of the directions is in the time.
    """
    selective_scan_fn = importlib.import_module(f"{PEER}.ops.selective_scan_interface").selective_scan_fn
    names = dict(x="u", dt="delta", k="B", q="C")
    leaves = {}
    for g in range(len(reverse)):
        leaves |= {f"{new}{g}": values[old][g].mT.contiguous().requires_grad_() for old, new in names.items()}
        for name, new in dict(A="A", D="D", dt_bias="delta_bias").items():
            leaves[f"{new}{g}"] = values[name][g].contiguous().requires_grad_()
    if "z" in values:
        leaves["z"] = values["z"].mT.contiguous().requires_grad_()

    def function(**leaves: Tensor) -> list[Tensor]:
        z = leaves.pop("z", None)
        directions = [{n[:-1]: t for n, t in leaves.items() if n.endswith(str(g))} for g in range(len(reverse))]
        return [selective_scan_fn(**arguments, z=z, delta_softplus=True) for arguments in directions]

    return function, leaves, [cotangent.mT.contiguous()] * len(reverse)


def _call(function, leaves: dict[str, Tensor], cotangents: list[Tensor], train: bool) -> None:
    if train:
        torch.autograd.grad(function(**leaves), list(leaves.values()), cotangents)
        return
    with torch.no_grad():
        function(**leaves)


def report_scans(outcomes: Sequence[Outcome], gb_per_s: float) -> list[dict[str, Any]]:
    """Prints a table for each workload, forward and with backward; returns them as plain data."""
    rows = [row for outcome in outcomes for row in outcome.rows]
    rows.sort(key=lambda row: row["backend"] != PEER)  # what the others are held against comes first
    tables = []
    for workload, train in cells():
        here = [row for row in rows if row["workload"] == workload._asdict() and row["train"] == train]
        if not here:
            continue
        samples, extra = {}, {}
        for row in here:
            name = f"{row['backend']} {row['rule']}"
            floor = row["bytes"] / gb_per_s / 1e6
            samples[name] = [ms / 1e3 for ms in row["device_ms"]]
            device, called = statistics.median(row["device_ms"]), statistics.median(row["called_ms"])
            extra[name] = {"called ms": called, "floor ms": floor, "x floor": device / floor}
        title = f"scan, {'forward + backward' if train else 'forward'}, {workload.title}, "
        title += " ".join(f"{n}={getattr(workload, n)}" for n in "BLDN") + " bfloat16"
        tables.append(table(title, samples, digits=4, extra=extra))
    return tables
