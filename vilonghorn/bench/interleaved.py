"""Interleaved timing: candidates take rounds in turn, each in its own process."""

from __future__ import annotations

import gc
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch

from ..tools.processes import worker_pool

Steps = Mapping[str, Callable[[], object]]  # by name, what a candidate can run
Factory = Callable[[], Steps]
Row = dict[str, Any]
Sample = tuple[float, float | None]  # milliseconds of a call, and the peak of memory in GB

SAMPLE_SECONDS = 0.02  # short steps are repeated until a sample takes this long
PAUSE_SECONDS = 0.005  # before a sample: threads of the last candidate may still spin
FLUSH_BYTES = 256 << 20  # more than the last-level cache of a GPU


class InterleavedBenchmark:
    """Times candidates in turn, so that a disturbance of the machine affects all candidates of a round.

    A candidate that raises or crashes gets a `problem` instead of figures, and the others go on.

    Args:
        candidates: by name, a picklable function that makes the candidate's steps in its process.
        threads: torch threads of each process.
        device: "cpu", or "cuda" to time by CUDA events.
    """

    def __init__(self, candidates: Mapping[str, Factory], threads: int, device: str = "cpu"):
        self.candidates, self.threads, self.device = candidates, threads, device
        self._pools: dict[str, ProcessPoolExecutor] = {}
        self._problems: dict[str, str] = {}

    def run(self, steps: Sequence[str], rounds: int, restarts: int = 1) -> dict[str, dict[str, Row]]:
        """Times steps of every candidate.

        Args:
            steps: names of the steps. Every candidate has all of them.
            rounds: samples of each step.
            restarts: processes of each candidate, one after the other, which share the rounds. Memory placement affects
                the speed of a process for its whole life.

        Returns:
            By step and candidate: `ms`, the time of one call in each round; `memory_gb`, the peak of memory above what
            the process held before it made the candidate, or None where the system does not tell; and `problem`, or
            None. Without samples, `ms` and `memory_gb` are None.
        """
        samples: dict[tuple[str, str], list[Sample]] = {}
        for restart in range(min(restarts, rounds)):
            with ExitStack() as stack:
                names = self._alive(self.candidates)
                self._pools = {name: stack.enter_context(self._start(name)) for name in names}
                futures = {n: pool.submit(_setup, self.candidates[n], self.device) for n, pool in self._pools.items()}
                for name, future in futures.items():
                    self._result(name, future)
                for step in steps:
                    for name in self._alive(names):
                        self._result(name, self._pools[name].submit(_warm_up, step))
                    for round_, _ in enumerate(range(restart, rounds, restarts)):
                        for name in self._alive(names)[:: -1 if round_ % 2 else 1]:
                            time.sleep(PAUSE_SECONDS)
                            if sample := self._result(name, self._pools[name].submit(_measure)):
                                samples.setdefault((step, name), []).append(sample)
                            else:
                                samples.pop((step, name), None)
        return {step: {name: self._row(name, samples.get((step, name))) for name in self.candidates} for step in steps}

    def _start(self, name: str) -> AbstractContextManager[ProcessPoolExecutor]:
        """The pool with the one process of a candidate."""
        return worker_pool(1, threads=self.threads)

    def _alive(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if name not in self._problems]

    def _result(self, name: str, future: Future) -> Any:
        """What a candidate answers, or None and its problem noted."""
        try:
            return future.result()
        except Exception as error:  # the candidate's own, or BrokenProcessPool
            self._problems[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"

    def _row(self, name: str, samples: Sequence[Sample] | None) -> Row:
        if not samples:
            return dict(ms=None, memory_gb=None, problem=self._problems[name])
        peaks = [peak for _, peak in samples]
        return dict(ms=[ms for ms, _ in samples], memory_gb=None if None in peaks else max(peaks), problem=None)


class _Candidate:
    """The candidate of this process."""

    def __init__(self, factory: Factory, device: str):
        torch.manual_seed(0)
        self.device = device
        # Trigger lazy initialisation before measuring RSS. Freeing 28 MiB makes malloc keep pages, as in training.
        torch.nn.Linear(8, 8, device=device)(torch.ones(8, 8, device=device)).sum().backward()
        torch.empty(7 << 20)
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device) if device == "cuda" else None
        self.before = peak_bytes(device, reset=True)
        self.steps = factory()

    def warm_up(self, step: str) -> None:
        """Chooses a step. Its first call is the warm-up, and a second one where the first is short."""
        self.call = self.steps[step]
        gc.collect()
        peak_bytes(self.device, reset=True)
        self.repeats = 1
        ms = self.time()
        if ms < 250:
            ms = min(ms, self.time())
        self.repeats = max(1, round(SAMPLE_SECONDS * 1e3 / ms))

    def measure(self) -> Sample:
        if self.repeats > 1:
            self.call()  # refill the caches, which the other candidates have used
        ms, peak = self.time(), peak_bytes(self.device)
        return ms, None if peak is None else (peak - self.before) / 1e9

    def time(self) -> float:
        """Milliseconds of a call: the mean of all repeats on a CPU, their median on a GPU."""
        if self.device == "cuda":
            return self.time_by_events()
        start = time.perf_counter()
        for _ in range(self.repeats):
            self.call()
        return (time.perf_counter() - start) * 1e3 / self.repeats

    def time_by_events(self) -> float:
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(self.repeats)]
        for start, end in pairs:
            self.flush.zero_()  # inputs come from memory, and the CPU gets ahead of the GPU
            start.record()
            self.call()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in pairs)


_candidate: _Candidate


def _setup(factory: Factory, device: str) -> None:
    global _candidate
    _candidate = _Candidate(factory, device)


def _warm_up(step: str) -> None:
    _candidate.warm_up(step)


def _measure() -> Sample:
    return _candidate.measure()


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
