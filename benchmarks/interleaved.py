"""Interleaved timing: candidates take rounds in turn, each in its own process."""

import gc
import multiprocessing
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

Steps = Mapping[str, Callable[[], object]]  # by name, what a candidate can run
Factory = Callable[[], Steps]
Row = dict[str, Any]

STEPS = {False: "forward", True: "forward + backward"}  # of the scan and the models, by whether a row's `train` is set
SAMPLE_SECONDS = 0.02  # short steps are repeated until a sample takes this long
PAUSE_SECONDS = 0.005  # before a sample, because threads of the last candidate may still spin


def run_interleaved(
    candidates: Mapping[str, Factory],
    steps: Sequence[str],
    rounds: int,
    *,
    threads: int,
    device: str = "cpu",
    restarts: int = 1,
) -> dict[str, dict[str, Row]]:
    """Times candidates in turn, so that a disturbance of the machine affects all candidates of a round.

    A step that raises or ends its process has a `problem` instead of figures. The others are still measured.

    Args:
        candidates: by name, a picklable function that makes the candidate's steps in its process.
        steps: names of the steps. Every candidate has all of them.
        rounds: samples of each step. `torch.utils.benchmark.Timer` takes them, and calls each step untimed before.
        threads: torch threads of each process.
        device: "cpu" or "cuda".
        restarts: processes of each candidate, one after the other, which share the rounds, because memory placement
            affects the speed of a process.

    Returns:
        By step and candidate: `ms`, the time of one call in each round; `memory_gb`, the peak of memory above what the
        process held before it made the candidate, or None where the system does not measure it; and `problem`, or
        None. With a problem, `ms` and `memory_gb` are None.
    """
    rows = {step: {name: dict(ms=[], memory_gb=None, problem=None) for name in candidates} for step in steps}
    for restart in range(min(restarts, rounds)):
        with ExitStack() as stack:
            pools = {name: stack.enter_context(_worker(threads)) for name in candidates}
            setups = {name: pools[name].submit(_setup, make, device) for name, make in candidates.items()}
            wait(setups.values())
            for step in steps:
                for i, _ in enumerate(range(restart, rounds, restarts)):
                    for name in list(candidates)[:: -1 if i % 2 else 1]:
                        row = rows[step][name]
                        if row["problem"]:
                            continue
                        time.sleep(PAUSE_SECONDS)
                        try:
                            setups[name].result()
                            ms, peak = pools[name].submit(_measure, step, device).result()
                        except Exception as error:  # the candidate's own, or BrokenProcessPool
                            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
                            row.update(ms=None, memory_gb=None, problem=problem)
                        else:
                            row["ms"].append(ms)
                            row["memory_gb"] = peak if peak is None else max(peak, row["memory_gb"] or 0)
    return rows


def _worker(threads: int) -> ProcessPoolExecutor:
    """A process with so many torch threads. It ends when this process ends, however that does."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _init_worker, (threads,))


def _init_worker(threads: int) -> None:
    torch.set_num_threads(threads)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    multiprocessing.parent_process().join()  # type: ignore[union-attr]
    os._exit(1)


_steps: Steps  # of the candidate of this process
_bytes_before: int | None


def _setup(factory: Factory, device: str) -> None:
    """Makes the candidate of this process."""
    global _steps, _bytes_before
    torch.manual_seed(0)
    # Trigger lazy initialisation before measuring RSS. Freeing 28 MiB makes malloc keep pages, as in training.
    torch.nn.Linear(8, 8, device=device)(torch.ones(8, 8, device=device)).sum().backward()
    torch.empty(7 << 20)
    peak_bytes(device)
    _bytes_before = peak_bytes(device)
    _steps = factory()
    gc.collect()


def _measure(step: str, device: str) -> tuple[float, float | None]:
    """Milliseconds of a call, and the peak of memory in GB."""
    from torch.utils.benchmark import Timer  # its import warns of a missing GPU where there is nvcc

    timer = Timer("step()", globals=dict(step=_steps[step]), num_threads=torch.get_num_threads())
    peak_bytes(device)
    ms = 1e3 * timer.blocked_autorange(min_run_time=SAMPLE_SECONDS).median
    peak = peak_bytes(device)
    return ms, None if peak is None else (peak - _bytes_before) / 1e9


def peak_bytes(device: str = "cpu") -> int | None:
    """Peak of this process's memory since the last call, in bytes; then a new peak starts from the present size.

    It is resident memory, or allocated memory of a GPU; None on a CPU where not Linux.
    """
    if device == "cuda":
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak
    process = Path("/proc/self")
    if not (process / "clear_refs").exists():
        return None
    peak = int(re.search(r"VmHWM:\s*(\d+)", (process / "status").read_text())[1]) * 1024
    (process / "clear_refs").write_text("5")
    return peak
