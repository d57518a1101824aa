"""Interleaved timing: candidates take rounds in turn, each in its own process."""

import gc
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from ..engine.processes import worker_pool

Steps = Mapping[str, Callable[[], object]]  # by name, what a candidate can run
Factory = Callable[[], Steps]
Row = dict[str, Any]
Sample = tuple[float, float | None]  # milliseconds of a call, and the peak of memory in GB

SAMPLE_SECONDS = 0.02  # short steps are repeated until a sample takes this long
PAUSE_SECONDS = 0.005  # before a sample, because threads of the last candidate may still spin
FLUSH_BYTES = 256 << 20  # more than the last-level cache of a GPU


def run_interleaved(
    candidates: Mapping[str, Factory],
    steps: Sequence[str],
    rounds: int,
    *,
    threads: int,
    device: str = "cpu",
    restarts: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, dict[str, Row]]:
    """Times candidates in turn, so that a disturbance of the machine affects all candidates of a round.

    A step that raises or ends its process has a `problem` instead of figures. The others are still measured.

    Args:
        candidates: by name, a picklable function that makes the candidate's steps in its process.
        steps: names of the steps. Every candidate has all of them.
        rounds: samples of each step.
        threads: torch threads of each process.
        device: "cpu", or "cuda" to time by CUDA events.
        restarts: processes of each candidate, one after the other, which share the rounds, because memory placement
            affects the speed of a process.
        clock: seconds on a CPU: `time.perf_counter`, or `time.process_time`, the processor time of all threads.

    Returns:
        By step and candidate: `ms`, the time of one call in each round; `memory_gb`, the peak of memory above what the
        process held before it made the candidate, or None where the system does not measure it; and `problem`, or
        None. With a problem, `ms` and `memory_gb` are None.
    """
    samples: dict[tuple[str, str], list[Sample]] = {(step, name): [] for step in steps for name in candidates}
    problems: dict[tuple[str, str], str] = {}

    @contextmanager
    def problem_of(name: str, *steps: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the candidate's own, or BrokenProcessPool
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
            problems.update({(step, name): problem for step in steps})

    for restart in range(min(restarts, rounds)):
        with ExitStack() as stack:
            names = [name for name in candidates if any((step, name) not in problems for step in steps)]
            pools = {name: stack.enter_context(worker_pool(1, threads=threads)) for name in names}
            setups = {name: pool.submit(_setup, candidates[name], device, clock) for name, pool in pools.items()}
            for name, setup in setups.items():
                with problem_of(name, *steps):
                    setup.result()
            for step in steps:
                for name in names:
                    if (step, name) not in problems:
                        with problem_of(name, step):
                            pools[name].submit(_call, "warm_up", step).result()
                for round_, _ in enumerate(range(restart, rounds, restarts)):
                    for name in names[:: -1 if round_ % 2 else 1]:
                        if (step, name) not in problems:
                            time.sleep(PAUSE_SECONDS)
                            with problem_of(name, step):
                                samples[step, name].append(pools[name].submit(_call, "measure").result())

    def row(key: tuple[str, str]) -> Row:
        if key in problems:
            return dict(ms=None, memory_gb=None, problem=problems[key])
        ms, peaks = zip(*samples[key])
        return dict(ms=list(ms), memory_gb=None if None in peaks else max(peaks), problem=None)

    return {step: {name: row((step, name)) for name in candidates} for step in steps}


class _Candidate:
    """The candidate of this process."""

    def __init__(self, factory: Factory, device: str, clock: Callable[[], float]):
        torch.manual_seed(0)
        self.device, self.clock = device, clock
        # Trigger lazy initialisation before measuring RSS. Freeing 28 MiB makes malloc keep pages, as in training.
        torch.nn.Linear(8, 8, device=device)(torch.ones(8, 8, device=device)).sum().backward()
        torch.empty(7 << 20)
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device) if device == "cuda" else None
        self.before = peak_bytes(device, reset=True)
        self.steps = factory()

    def warm_up(self, step: str) -> None:
        """Chooses a step. Its first call is the warm-up, and a second one where the first is short."""
        self.call, self.repeats = self.steps[step], 1
        gc.collect()
        peak_bytes(self.device, reset=True)
        ms = self.time()
        if ms < 250:
            ms = min(ms, self.time())
        self.repeats = max(1, round(SAMPLE_SECONDS * 1e3 / ms))

    def measure(self) -> Sample:
        self.call()  # untimed: refills the caches; threads of the last candidate may spin longer than the pause
        ms, peak = self.time(), peak_bytes(self.device)
        return ms, None if peak is None else (peak - self.before) / 1e9

    def time(self) -> float:
        """Milliseconds of a call: the mean of all repeats on a CPU, their median on a GPU."""
        if self.device == "cpu":
            start = self.clock()
            for _ in range(self.repeats):
                self.call()
            return (self.clock() - start) * 1e3 / self.repeats
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(self.repeats)]
        for start, end in pairs:
            self.flush.zero_()  # inputs come from memory, and the CPU gets ahead of the GPU
            start.record()
            self.call()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in pairs)


_candidate: _Candidate


def _setup(factory: Factory, device: str, clock: Callable[[], float]) -> None:
    global _candidate
    _candidate = _Candidate(factory, device, clock)


def _call(method: str, *arguments: str) -> Sample | None:
    return getattr(_candidate, method)(*arguments)


def peak_bytes(device: str = "cpu", reset: bool = False) -> int | None:
    """Peak of this process's memory in bytes: resident memory, or allocated memory of a GPU; None where not Linux.

    Args:
        device: "cpu" or "cuda".
        reset: start a new peak from the present size first.
    """
    if device == "cuda":
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated()
    process = Path("/proc/self")
    if not (process / "clear_refs").exists():
        return None
    if reset:
        (process / "clear_refs").write_text("5")
    return int(re.search(r"VmHWM:\s*(\d+)", (process / "status").read_text())[1]) * 1024
