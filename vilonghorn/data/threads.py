"""Threads for work that releases Python's lock, such as decoding and encoding images."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

S = TypeVar("S")
T = TypeVar("T")


def available_cpus() -> int:
    """Number of CPUs that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_order(function: Callable[[S], T], items: Iterable[S], workers: int) -> Iterator[T]:
    """Yields function(item) in the order of `items`, computed by threads up to 4 * `workers` items ahead.

    An error of the function is raised in the place of its result. Closing the iterator ends the threads.
    """
    pool = ThreadPoolExecutor(workers)
    pending: deque = deque()
    try:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) > 4 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
