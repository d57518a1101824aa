"""The processes of a run, as torchrun starts them: one alone, or many that compute every update together.

Gradients and buffers travel on the device (NCCL, or gloo on a CPU); numbers and decisions always through gloo.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

T = TypeVar("T")
TIMEOUT = timedelta(minutes=10)  # that a process may keep the others waiting, as when it reads a cold disk
FAILURES = (ValueError, OSError, ImportError, FloatingPointError)  # what a person can set right


class PeerFailed(OSError):
    """Another process of the run failed, or is gone."""


class Ranks:
    """The processes of a run, seen from this one.

    Attributes:
        rank: number of this process, from 0.
        world_size: number of processes.
        local_rank: number of this process on its machine.
        local_size: number of processes on this machine.
        main: whether this is process 0, which alone writes and prints.
    """

    def __init__(self) -> None:
        self.rank, self.local_rank = (int(os.environ.get(name, 0)) for name in ("RANK", "LOCAL_RANK"))
        self.world_size, self.local_size = (int(os.environ.get(name, 1)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        self.main = self.rank == 0

    def join(self) -> None:
        """Meets the other processes; does nothing where this one is alone or has met them already.

        Raises:
            PeerFailed: not all of them came in time.
        """
        if self.world_size > 1 and not dist.is_initialized():
            nccl = torch.cuda.is_available() and dist.is_nccl_available()
            backend = "cpu:gloo,cuda:nccl" if nccl else "gloo"
            with self.peers():
                store, rank, size = next(dist.rendezvous("env://", timeout=TIMEOUT))
                if self.local_size == self.world_size:
                    # torchrun's store outlives a restart, and what dead processes left in it would mislead the new ones
                    # (pytorch issue 135712). Machines may count restarts differently: see docs/training.md for those.
                    store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
                dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)

    def leave(self) -> None:
        """Parts from the other processes."""
        if dist.is_initialized():
            dist.destroy_process_group()

    @contextmanager
    def peers(self) -> Iterator[None]:
        """Says in a sentence that another process is gone, where torch tells it by an error of its transport.

        Raises:
            PeerFailed: the error came from communication.
        """
        try:
            yield
        except RuntimeError as error:
            of_transport = isinstance(error, dist.DistError) or any(word in str(error) for word in ("gloo", "NCCL"))
            if self.world_size == 1 or not of_transport:
                raise
            raise PeerFailed(
                f"process {self.rank} of {self.world_size} lost the others ({str(error).splitlines()[0]}): start the "
                "run again with --auto-resume"
            ) from error

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """The sums of numbers (n,) over all processes, in float64."""
        if self.world_size == 1:
            return [*numbers]
        total = torch.tensor(numbers, dtype=torch.float64)
        with self.peers():
            dist.all_reduce(total)
        return total.tolist()

    def most(self, number: int) -> int:
        """The largest of a number of each process."""
        if self.world_size == 1:
            return number
        most = torch.tensor(number)
        with self.peers():
            dist.all_reduce(most, dist.ReduceOp.MAX)
        return int(most)

    def together(self, work: Callable[[], T]) -> T:
        """Does work that may fail in one process only, so that all go on or none does.

        Args:
            work: called in every process; communicates with none.

        Returns:
            What `work` returned here.

        Raises:
            PeerFailed: it failed in another process, whose reason it repeats.
            ValueError, OSError, ImportError, FloatingPointError: it failed here.
        """
        result, error = None, None
        try:
            result = work()
        except FAILURES as failure:
            error = failure
        if self.world_size > 1:
            told: list[str | None] = [None] * self.world_size
            with self.peers():
                dist.all_gather_object(told, None if error is None else str(error))
            if error is None and (failed := [rank for rank, reason in enumerate(told) if reason is not None]):
                raise PeerFailed(f"process {failed[0]} of {self.world_size}: {told[failed[0]]}")
        if error is not None:
            raise error
        return result

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        """The model, or where there are several processes, a module that averages its gradients over them."""
        if self.world_size == 1:
            return model
        ids = [device.index] if device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)

    def share_buffers(self, module: nn.Module) -> None:
        """Gives every process the buffers of process 0, such as the statistics of batch norms, which alone are saved."""
        if self.world_size > 1:
            with self.peers():
                for buffer in module.buffers():
                    dist.broadcast(buffer, 0)
