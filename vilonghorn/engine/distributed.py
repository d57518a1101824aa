"""The processes of a run, as torchrun starts them, and the signals that ask them to stop.

Gradients and buffers are reduced on the device (NCCL, or gloo on a CPU), numbers and decisions always through gloo.
"""

import os
import shlex
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ..data.loaders.processes import SIGNALS

T = TypeVar("T")
TIMEOUT = timedelta(minutes=10)  # longest wait for another process, which may read files from a slow disk
USER_ERRORS = (ValueError, OSError, ImportError, FloatingPointError)  # errors that a user can fix


def shell_path(path: str | Path) -> str:
    """A path as one argument in a shell, which is no option and is not expanded."""
    return shlex.quote(f"./{path}" if str(path).startswith(("-", "~")) else str(path))


class PeerFailed(OSError):
    """Another process of the run failed or died."""


def _number(name: str, least: int) -> int:
    """The value of an environment variable, `least` if it is unset or empty. Raises ValueError if it is below."""
    text = os.environ.get(name) or str(least)
    if not (text.isdecimal() and int(text) >= least):
        raise ValueError(f"{name} is {text!r}, expected a number from {least} on, as torchrun sets it: unset it")
    return int(text)


class Distributed:
    """The processes of a run, as the environment variables of torchrun describe them."""

    def __init__(self) -> None:
        self.rank = _number("RANK", 0)
        self.world_size = _number("WORLD_SIZE", 1)
        self.local_rank = _number("LOCAL_RANK", 0)  # among the processes of this machine
        self.local_size = _number("LOCAL_WORLD_SIZE", 1)  # processes on this machine
        self.is_main = self.rank == 0  # only process 0 writes and prints
        self.restarts = _number("TORCHELASTIC_RESTART_COUNT", 0)  # by torchrun, after failures
        if self.rank >= self.world_size:  # a process alone would print nothing
            found = f"RANK is {self.rank} and WORLD_SIZE is {self.world_size}, expected a RANK below it"
            raise ValueError(f"{found}: start the processes by torchrun, or unset both")

    def init(self) -> None:
        """Initialises the group of several processes, once. Raises PeerFailed if one is missing after TIMEOUT."""
        if self.world_size == 1 or dist.is_initialized():
            return
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
        with self.peer_errors():
            store, rank, size = next(dist.rendezvous("env://", timeout=TIMEOUT))
            if self.local_size == self.world_size:
                # torchrun's store survives a restart: a prefix hides the keys of the ended processes (pytorch issue
                # 135712). Several machines may count restarts differently: docs/training.md has their setting.
                store = dist.PrefixStore(f"attempt {self.restarts}", store)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)

    def resume_command(self, directory: Path) -> str:
        """The command line that resumes a run with as many processes."""
        nodes, command, on_each = self.world_size // self.local_size, "torchrun --standalone", ""
        if nodes > 1:
            endpoint, on_each = f"{os.environ.get('MASTER_ADDR', 'HOST')}:29500", f"on each of the {nodes} machines "
            command = f"torchrun --nnodes={nodes} --rdzv-backend=c10d --rdzv-endpoint={endpoint}"
        command = f"{command} --nproc-per-node={self.local_size} -m " if self.world_size > 1 else ""
        return f"resume {on_each}with: {command}vilonghorn train --resume {shell_path(directory)}"

    def print(self, line: str) -> None:
        """Prints a line in process 0, at once."""
        if self.is_main:
            print(line, flush=True)

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
            raise PeerFailed(f"{who} cannot reach the others ({reason}): resume with --auto-resume") from error

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """The sums of numbers (n,) over all processes, in float64."""
        return self._reduce(torch.tensor(numbers, dtype=torch.float64)).tolist()

    def average(self, values: torch.Tensor) -> torch.Tensor:
        """The mean of values of any shape over all processes, on their device and in place."""
        return self._reduce(values).div_(self.world_size)

    def _reduce(self, values: torch.Tensor) -> torch.Tensor:
        if self.world_size > 1:
            with self.peer_errors():
                dist.all_reduce(values)
        return values

    def gather(self, value: T) -> list[T]:
        """A picklable value of each process, in all processes."""
        values = [value] * self.world_size
        if self.world_size > 1:
            with self.peer_errors():
                dist.all_gather_object(values, value)
        return values

    def run_on_all(self, function: Callable[[], T]) -> T:
        """The result of a function, which must not communicate, in this process; PeerFailed if it fails in another."""
        try:
            result = function()
        except USER_ERRORS as error:
            self.gather(str(error))
            raise
        reasons = self.gather(None)
        if failed := [rank for rank, reason in enumerate(reasons) if reason is not None]:
            raise PeerFailed(f"process {failed[0]} of {self.world_size}: {reasons[failed[0]]}")
        return result

    def broadcast_buffers(self, module: nn.Module) -> None:
        """Copies the buffers of process 0, such as batch norm statistics, to all processes."""
        if self.world_size > 1:
            with self.peer_errors():
                for buffer in module.buffers():
                    dist.broadcast(buffer, 0)


class Interrupted(Exception):
    """The signal `signum` stopped the run; the message says where, and how to resume."""

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(signum, message)  # both arguments, so that the exception can be pickled
        self.signum = signum

    def __str__(self) -> str:
        return self.args[1]


class StopRequest:
    """Inside its `with` block, SIGINT, SIGTERM and SIGUSR1 only set a flag. A second SIGINT acts at once."""

    def __init__(self, dist: Distributed, position: Callable[[], str]) -> None:
        self.dist, self.position = dist, position  # the end of the message: where the run stopped, how to resume it

    def __enter__(self) -> "StopRequest":
        self.signum: int | None = None
        self.previous = {signum: signal.signal(signum, self._handle) for signum in SIGNALS}
        return self

    def __exit__(self, *exception: Any) -> None:
        for signum, handler in self.previous.items():
            signal.signal(signum, handler)

    def _handle(self, signum: int, frame: Any) -> None:
        self.signum = signum
        if signum == signal.SIGINT:
            signal.signal(signum, self.previous[signum])

    def check(self) -> None:
        """Raises Interrupted in all processes if one received a signal. All must call this equally often."""
        received = self.dist.sum([float(signum == self.signum) for signum in SIGNALS])
        for signum, processes in zip(SIGNALS, received):
            if processes:
                raise Interrupted(signum, f"stopped by {signal.Signals(signum).name} {self.position()}")
