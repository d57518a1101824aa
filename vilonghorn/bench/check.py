"""Checks the scan's backends on a device: values and gradients against float64, repetition, graphs, threads.

Every case draws its own inputs, and new memory holds NaN, so that an element that a kernel leaves out is seen. The
tests hold the same backends to more shapes on a CPU; this is for kernels that only a device can run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from vilonghorn.ops import scan
from vilonghorn.ops.backends import BACKENDS
from vilonghorn.ops.reference import scan_reference
from vilonghorn.ops.validate import REDUCTIONS, RULES

from .device import capture
from .inputs import output_shape, random_inputs, value_and_gradients
from .tasks import Outcome

# Of a result, by its type: what rounding to it costs at random, or float32 sums over batch and time, and some room.
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2e-3, torch.float16: 2.5e-4}
VALUES, PARAMETERS = {"y", "y, inference"}, {"A", "D", "dt_bias"}
Finding = tuple[dict[str, Optional[float]], Optional[str]]  # errors by name (None: not finite), and what is wrong
Check = Callable[..., Finding]


class Shape(NamedTuple):
    """Sizes of a case; its directions are as many as its flags."""

    B: int
    L: int
    D: int
    N: int
    reverse: tuple[bool, ...]
    sliced: bool  # k and q are slices of a projection


# 224 px at patch 16 and at stride 8, then odd sizes that fit no tile. On a CPU, float64 takes its time.
SHAPES = {
    "cuda": (
        Shape(8, 197, 384, 16, (False, True), sliced=False),
        Shape(2, 785, 384, 16, (False, True), sliced=True),
        Shape(3, 65, 77, 24, (True, False, True), sliced=True),
    ),
    "cpu": (
        Shape(2, 197, 96, 16, (False, True), sliced=False),
        Shape(2, 65, 77, 24, (True, False, True), sliced=True),
    ),
}
# 1248 px, one image: so long a scan may be split over time. One form of it, for its reference takes long.
LONG = {"cuda": [Shape(1, 6084, 384, 16, (False, True), sliced=False)], "cpu": []}


@dataclass
class CheckTask:
    """All cases of one backend, rule and type of activations."""

    device: str
    backend: str
    rule: str
    dtype: torch.dtype
    seed: int
    seconds: float = 0

    @property
    def title(self) -> str:
        return f"{self.backend} {self.rule} {_name(self.dtype)}"

    def prepare(self) -> None:
        """Checks, since checks may run side by side."""
        self.generator = torch.Generator(self.device).manual_seed(self.seed)
        cases = [*itertools.product(SHAPES[self.device], REDUCTIONS, (True, False))]
        cases += [(shape, "mean", True) for shape in LONG[self.device]]
        self.rows = [self._row("values", self._check_values, *case) for case in cases]
        gated = (SHAPES[self.device][0], "mean", True)
        self.rows.append(self._row("repetition", self._check_repetition, *gated))
        self.rows.append(self._row("threads", self._check_threads, *gated))
        if self.device == "cuda":
            self.rows.append(self._row("graph", self._check_graph, *gated))

    def measure(self) -> list[dict[str, Any]]:
        return self.rows

    def _row(self, kind: str, check: Check, shape: Shape, reduce: str, gate: bool) -> dict[str, Any]:
        """What `check` finds, as plain data; an exception is a finding."""
        row = dict(
            kind=kind,
            backend=self.backend,
            rule=self.rule,
            dtype=_name(self.dtype),
            shape=shape._asdict(),
            reduce=reduce,
            gate=gate,
            errors={},
            problem=None,
        )
        try:
            row["errors"], row["problem"] = check(shape, reduce, gate)
        except Exception as error:
            row["problem"] = f"{type(error).__name__}: {error}"
        return row

    def _draw(self, shape: Shape, reduce: str, gate: bool):
        """Inputs and cotangent, the scan that takes them, and its reference."""
        B, L, D, N, reverse, sliced = shape
        values = random_inputs(
            len(reverse),
            B,
            L,
            D,
            N,
            rule=self.rule,
            dtype=self.dtype,
            generator=self.generator,
            gate=gate,
            skip=gate,
            sliced=sliced,
        )
        cotangent = torch.randn(output_shape(values, reduce), generator=self.generator, device=self.device)
        options = dict(rule=self.rule, reverse=reverse, reduce=reduce)
        function, reference = partial(scan, backend=self.backend, **options), partial(scan_reference, **options)
        return values, cotangent.to(self.dtype), function, reference

    def _check_values(self, *case) -> Finding:
        values, cotangent, function, reference = self._draw(*case)
        double = {name: value.double() for name, value in values.items()}
        expected = value_and_gradients(reference, double, cotangent.double())
        with poisoned(self.device):
            actual = value_and_gradients(function, values, cotangent)
            with torch.no_grad():
                actual["y, inference"] = function(**values)
        expected["y, inference"] = expected["y"]
        errors = {name: relative_error(actual[name], expected[name]) for name in expected}
        problems = [f"{n} is off by {e:.1e}" for n, e in errors.items() if not e <= TOLERANCE[actual[n].dtype]]
        return {n: e if math.isfinite(e) else None for n, e in errors.items()}, "; ".join(problems) or None

    def _check_repetition(self, *case) -> Finding:
        values, cotangent, function, _ = self._draw(*case)
        with poisoned(self.device):
            return {}, _difference(*(value_and_gradients(function, values, cotangent) for _ in range(2)))

    def _check_threads(self, *case) -> Finding:
        """Two threads, on a GPU each on a stream of its own, get what each gets alone."""
        drawn = [self._draw(*case)[:3] for _ in range(2)]
        with poisoned(self.device):
            alone = [value_and_gradients(function, values, cotangent) for values, cotangent, function in drawn]
            if self.device == "cuda":
                torch.cuda.synchronize()

            def work(values, cotangent, function) -> list[dict[str, Tensor]]:
                stream = torch.cuda.Stream() if self.device == "cuda" else None
                with torch.cuda.stream(stream) if stream else nullcontext():
                    results = [value_and_gradients(function, values, cotangent) for _ in range(3)]
                if stream:
                    stream.synchronize()
                return results

            with ThreadPoolExecutor(2) as pool:
                futures = [pool.submit(work, *arguments) for arguments in drawn]
            pairs = [(expected, r) for expected, future in zip(alone, futures) for r in future.result()]
        return {}, next(filter(None, (_difference(*pair) for pair in pairs)), None)

    def _check_graph(self, *case) -> Finding:
        """A captured graph, replayed over new inputs, gives what calls give."""
        values, cotangent, function, _ = self._draw(*case)
        fresh_values, fresh_cotangent, *_ = self._draw(*case)
        with poisoned(self.device):
            expected = value_and_gradients(function, fresh_values, fresh_cotangent)
            graph, (actual,) = capture([partial(value_and_gradients, function, values, cotangent)])
            for name, value in values.items():
                value.copy_(fresh_values[name])
            cotangent.copy_(fresh_cotangent)
            for result in actual.values():
                result.fill_(math.nan)
            graph.replay()
            torch.cuda.synchronize()
        return {}, _difference(expected, actual)


def check_tasks(device: str, seed: int) -> list[CheckTask]:
    """A task for each backend of the device, rule and type that it takes; those that compile longest come first."""
    return [
        CheckTask(device, name, rule, dtype, seed + i)
        for name, backend in reversed(BACKENDS.items())
        if device == "cpu" or name != "reference"
        for i, (rule, dtype) in enumerate((r, d) for r in RULES for d in TOLERANCE)
        if backend.unavailable(device, dtype) is None
    ]


def report_checks(outcomes: Sequence[Outcome]) -> tuple[list[dict[str, Any]], bool]:
    """Prints a line for each task, then what failed; returns all rows, and whether there are any and all passed."""
    print("\ncheck: ||result - float64|| / ||float64||, the largest of all cases")
    print(f"  {'':36}{'cases':>6}{'y':>10}{'dx .. dz':>10}{'dA .. db':>10}")
    rows, problems = [], []
    for outcome in outcomes:
        found = [_describe(row) for row in outcome.rows if row["problem"]]
        if outcome.problem:
            found.append(f"{outcome.task.title}: {outcome.problem}")
            rows.append(dict(kind="process", task=outcome.task.title, problem=outcome.problem))
        errors = [item for row in outcome.rows for item in row["errors"].items()]
        activations = {name for name, _ in errors} - {*VALUES, *PARAMETERS}
        columns = [_largest(errors, names) for names in (VALUES, activations, PARAMETERS)]
        verdict = f"FAIL ({len(found)})" if found else "pass"
        print(f"  {outcome.task.title:36}{len(outcome.rows):6}{''.join(f'{c:>10}' for c in columns)}   {verdict}")
        problems += found
        rows += outcome.rows
    for problem in problems:
        print(f"  FAIL {problem}")
    if not rows:
        print("  FAIL no backend is ready")
    return rows, bool(rows) and not problems


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """||actual - expected|| / ||expected|| in float64; NaN counts as infinite."""
    error = ((actual.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()
    return math.inf if math.isnan(error) else error


@contextmanager
def poisoned(device: str) -> Iterator[None]:
    """New memory holds NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        if not torch.empty(8, device=device).isnan().all():
            raise RuntimeError("torch does not fill new memory with NaN here: the check would miss unwritten results")
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = fill


def _difference(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> str | None:
    wrong = [name for name in expected if not torch.equal(expected[name], actual[name])]
    return f"not bitwise equal: {', '.join(wrong)}" if wrong else None


def _largest(errors: list[tuple[str, float | None]], names: set[str]) -> str:
    found = [math.inf if error is None else error for name, error in errors if name in names]
    return f"{max(found):.1e}" if found else "-"


def _describe(row: dict[str, Any]) -> str:
    shape = " ".join(f"{name}={value}" for name, value in row["shape"].items())
    gate = "gated" if row["gate"] else "plain"
    case = f"{row['kind']}, {shape} {row['reduce']} {gate}"
    return f"{row['backend']} {row['rule']} {row['dtype']}, {case}: {row['problem']}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
