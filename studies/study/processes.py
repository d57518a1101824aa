"""The process pool of the commands. No worker outlives its pool or the process that made it."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection

import torch

GRACE_SECONDS = 30  # time for a worker to save a training run before it is killed


@contextmanager
def worker_pool(workers: int, *, threads: int = 1) -> Iterator[ProcessPoolExecutor]:
    """A pool of spawned processes.

    A block that ends normally waits for the calls in progress. A block that raises stops the workers by SIGTERM, on
    which training saves its state. In the main thread, SIGTERM raises KeyboardInterrupt in the block, as SIGINT does.
    If this process dies, even by SIGKILL, its workers stop in the same way.

    Args:
        workers: number of processes.
        threads: torch threads of each worker.
    """
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    in_main_thread = threading.current_thread() is threading.main_thread()
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler) if in_main_thread else None
    pool = ProcessPoolExecutor(workers, context, _init_worker, (threads, reader))
    try:
        yield pool
        pool.shutdown()
    finally:
        writer.close()
        pool.shutdown(cancel_futures=True)
        reader.close()
        if in_main_thread:
            signal.signal(signal.SIGTERM, previous)


def _init_worker(threads: int, parent: Connection) -> None:
    """Sets the number of threads, leaves SIGINT to the parent, and watches the parent."""
    torch.set_num_threads(threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_stop_with, args=(parent,), daemon=True).start()


def _stop_with(parent: Connection) -> None:
    """Ends this process when the parent has closed its end of the pipe, which the kernel does for a dead process."""
    parent.poll(None)
    for _ in range(GRACE_SECONDS):  # the first signal may only make training save its state
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
    os._exit(1)
