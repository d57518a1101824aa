"""The processes of a torch DataLoader: their signals, their end, and their errors in one sentence."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Lock, active_children
from typing import Any

from torch.utils.data import DataLoader

# Ctrl-C; end or preemption of a job; the early warning that SLURM can send.
SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))

PATIENCE = 2.0  # seconds for all processes to end by themselves


def read_batches(loader: DataLoader, source: str) -> Iterator[Any]:
    """Iterates over a DataLoader of `source`, and ends its processes on every way out, also those that ignore SIGTERM.

    `default_collate` must make all tensors: in a worker it takes shared memory at once, and raises an error if there is
    none. torch would only print the error later, and wait for ever.
    """
    before, workers, batches = {*active_children()}, set(), None
    try:
        with _default_sigchld():
            try:
                if loader.num_workers:
                    Lock()  # fails here if /dev/shm is full; torch would print a traceback
                batches = iter(loader)
            finally:
                workers = {*active_children()} - before
        yield from batches
    except (RuntimeError, OSError, EOFError) as error:
        if not loader.num_workers:
            raise
        reason = (str(error) or type(error).__name__).splitlines()[-1]
        problem = f"{source}: a process that reads images failed or was killed ({reason})"
        remedy = "if memory is short, lower workers or batch_size; in a container, enlarge /dev/shm"
        raise ChildProcessError(f"{problem}; {remedy}") from error
    finally:
        if workers:
            with _default_sigchld():
                # torch tells them to end, by a lock that a killed one could hold, and waits 5 seconds for a busy one.
                timer = threading.Timer(PATIENCE, lambda: [worker.kill() for worker in workers])
                timer.start()
                batches = None
                timer.cancel()
                for worker in workers:
                    worker.kill()
                for worker in workers:
                    worker.join(1)


@contextmanager
def _default_sigchld() -> Iterator[None]:
    """Sets the default handler of SIGCHLD for a while: that of a DataLoader raises a worker's error anywhere."""
    if not hasattr(signal, "SIGCHLD") or threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can set a handler
        return
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler or signal.SIG_DFL)


def ignore_signals(worker: int) -> None:
    """Ignores requests to stop: the training process finishes its update first, and needs the batch."""
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
