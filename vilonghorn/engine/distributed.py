"""The processes of a run, as torchrun starts them, and the signals that ask them to stop.

Gradients and buffers are reduced on the device (NCCL, or gloo on a CPU), numbers and decisions always through gloo.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

T = TypeVar("T")
TIMEOUT = timedelta(minutes=10)  # one process may wait this long for another, which reads a cold disk
USER_ERRORS = (ValueError, OSError, ImportError, FloatingPointError)  # errors that a user can fix
# Ctrl-C; the end of a job or its preemption; what SLURM can send some minutes before.
SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))


class PeerFailed(OSError):
    """Another process of the run failed or died."""


class Distributed:
    """The processes of a run, seen from this one.

    Attributes:
        rank: number of this process, from 0.
        world_size: number of processes.
        local_rank: number of this process on its machine.
        local_size: number of processes on this machine.
        is_main: whether this is process 0, the only one that writes and prints.
        restarts: how often torchrun restarted the processes after a failure (`--max-restarts`).
    """

    def __init__(self) -> None:
        self.rank, self.local_rank = (int(os.environ.get(name, 0)) for name in ("RANK", "LOCAL_RANK"))
        self.world_size, self.local_size = (int(os.environ.get(name, 1)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        self.is_main, self.restarts = self.rank == 0, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))

    def init(self) -> None:
        """Initialises the process group, once, if there are several. Raises PeerFailed if some do not come in time."""
        if self.world_size == 1 or dist.is_initialized():
            return
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
        with self.peer_errors():
            store, rank, size = next(dist.rendezvous("env://", timeout=TIMEOUT))
            if self.local_size == self.world_size:
                # torchrun's store survives a restart, and keys of dead processes mislead the new ones (pytorch issue
                # 135712). Several machines may count restarts differently: docs/training.md has their setting.
                store = dist.PrefixStore(f"attempt {self.restarts}", store)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)

    def shutdown(self) -> None:
        """Destroys the process group, if there is one."""
        if dist.is_initialized():
            dist.destroy_process_group()

    @contextmanager
    def peer_errors(self) -> Iterator[None]:
        """Turns torch's communication errors into PeerFailed."""
        try:
            yield
        except RuntimeError as error:
            of_transport = isinstance(error, dist.DistError) or any(word in str(error) for word in ("gloo", "NCCL"))
            if self.world_size == 1 or not of_transport:
                raise
            who, reason = f"process {self.rank} of {self.world_size}", str(error).splitlines()[0]
            raise PeerFailed(f"{who} lost the others ({reason}): start the run again with --auto-resume") from error

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """The sums of numbers (n,) over all processes, in float64."""
        return self._reduce(torch.tensor(numbers, dtype=torch.float64), dist.ReduceOp.SUM)

    def max(self, number: int) -> int:
        """The largest of one number of each process."""
        return self._reduce(torch.tensor(number), dist.ReduceOp.MAX)

    def _reduce(self, values: torch.Tensor, op: dist.ReduceOp.RedOpType) -> list[float] | int:
        if self.world_size > 1:
            with self.peer_errors():
                dist.all_reduce(values, op)
        return values.tolist()

    def run_on_all(self, function: Callable[[], T]) -> T:
        """Calls a function in every process, and raises in all of them if it fails in one.

        It must not communicate. Returns what it returned in this process.

        Raises:
            PeerFailed: it failed in another process; the message repeats the reason.
            ValueError, OSError, ImportError, FloatingPointError: it failed here.
        """
        result, error = None, None
        try:
            result = function()
        except USER_ERRORS as failure:
            error = failure
        if self.world_size > 1:
            reasons: list[str | None] = [None] * self.world_size
            with self.peer_errors():
                dist.all_gather_object(reasons, None if error is None else str(error))
            if error is None and (failed := [rank for rank, reason in enumerate(reasons) if reason is not None]):
                raise PeerFailed(f"process {failed[0]} of {self.world_size}: {reasons[failed[0]]}")
        if error is not None:
            raise error
        return result

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        """The model, wrapped in DistributedDataParallel if there are several processes."""
        if self.world_size == 1:
            return model
        ids = [device.index] if device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)

    def broadcast_buffers(self, module: nn.Module) -> None:
        """Copies the buffers of process 0, such as batch norm statistics, to all processes."""
        if self.world_size > 1:
            with self.peer_errors():
                for buffer in module.buffers():
                    dist.broadcast(buffer, 0)


class Interrupted(Exception):
    """The signal `signum` stopped the run; the message says where and, once the run is saved, how to resume it."""

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(signum, message)  # both arguments, so that the exception can be pickled
        self.signum = signum

    def __str__(self) -> str:
        return self.args[1]


class StopRequest:
    """While entered, SIGINT, SIGTERM and SIGUSR1 only set a flag. A second SIGINT acts at once.

    SIGTERM and SIGUSR1 may be repeated: a cluster sends them to every process, and torchrun again to its own. All
    processes stop if one receives a signal.
    """

    def __init__(self, dist: Distributed) -> None:
        self.dist = dist

    def __enter__(self) -> StopRequest:
        self.signum: int | None = None
        self.previous = {signum: signal.signal(signum, self.handle) for signum in SIGNALS}
        return self

    def __exit__(self, *exception: Any) -> None:
        for signum, handler in self.previous.items():
            signal.signal(signum, handler)

    def handle(self, signum: int, frame: Any) -> None:
        """The signal handler."""
        self.signum = signum
        if signum == signal.SIGINT:
            signal.signal(signum, self.previous[signum])

    def check(self) -> None:
        """Raises Interrupted if any process received a signal. All processes must call this equally often."""
        received = self.dist.sum([float(signum == self.signum) for signum in SIGNALS])
        for signum, processes in zip(SIGNALS, received):
            if processes:
                raise Interrupted(signum, f"stopped by {signal.Signals(signum).name}")
