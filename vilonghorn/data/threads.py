"""Threads for work that releases Python's lock, such as decoding and encoding images."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def available_cpus() -> int:
    """Number of CPUs that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_order(function: Callable[[int], T], count: int, workers: int) -> Iterator[T]:
    """Yields function(0), function(1), ..., computed by `workers` threads; the number of waiting results is limited."""
    pool = ThreadPoolExecutor(workers)
    pending: deque = deque()
    try:
        for index in range(count):
            pending.append(pool.submit(function, index))
            if len(pending) > 4 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
