"""How a run is asked to stop: signals become a flag that the loop looks at where its state is whole."""

from __future__ import annotations

import signal
from typing import Any


class Interrupted(Exception):
    """The run was asked to stop by a signal.

    Args:
        signum: the signal.
        message: what was stopped and, once the run has saved itself, how it goes on.
    """

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.signum = signum


class StopRequest:
    """While entered, notes SIGINT and SIGTERM instead of dying of them; a second one acts at once."""

    def __enter__(self) -> StopRequest:
        self.signum: int | None = None
        self.previous = {signum: signal.signal(signum, self.note) for signum in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exception: Any) -> None:
        for signum, handler in self.previous.items():
            signal.signal(signum, handler)

    def note(self, signum: int, frame: Any) -> None:
        """The signal handler."""
        self.signum = signum
        signal.signal(signum, self.previous[signum])

    def obey(self) -> None:
        """Raises Interrupted if a signal came."""
        if self.signum is not None:
            raise Interrupted(self.signum, f"stopped by {signal.Signals(self.signum).name}")
