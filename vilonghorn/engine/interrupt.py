"""How a run is asked to stop: signals become a flag that the loop looks at where its state is whole."""

from __future__ import annotations

import signal
from typing import Any

from .distributed import Ranks

# Ctrl-C; the end of a job, or its preemption; what SLURM can send some minutes before either.
SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))


class Interrupted(Exception):
    """The run was asked to stop by a signal.

    Args:
        signum: the signal.
        message: what was stopped and, once the run has saved itself, how it goes on.
    """

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.signum = signum

    def __reduce__(self) -> tuple[type, tuple[int, str]]:
        """How it passes from one process to another."""
        return Interrupted, (self.signum, str(self))


class StopRequest:
    """While entered, notes SIGINT, SIGTERM and SIGUSR1 instead of dying of them; a second SIGINT acts at once.

    The others come twice without impatience: from a cluster to every process, and again from torchrun to its own.

    Args:
        ranks: the processes, which all stop if one is asked to.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def __enter__(self) -> StopRequest:
        self.signum: int | None = None
        self.previous = {signum: signal.signal(signum, self.note) for signum in SIGNALS}
        return self

    def __exit__(self, *exception: Any) -> None:
        for signum, handler in self.previous.items():
            signal.signal(signum, handler)

    def note(self, signum: int, frame: Any) -> None:
        """The signal handler."""
        self.signum = signum
        if signum == signal.SIGINT:
            signal.signal(signum, self.previous[signum])

    def obey(self) -> None:
        """Raises Interrupted if a signal came, to any of the processes, which call this the same number of times."""
        asked = self.ranks.sum([float(signum == self.signum) for signum in SIGNALS])
        for signum, processes in zip(SIGNALS, asked):
            if processes:
                raise Interrupted(signum, f"stopped by {signal.Signals(signum).name}")
