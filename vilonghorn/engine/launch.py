"""A command as one of the processes that torchrun starts, stops and starts again: what it says, and its exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from .interrupt import Interrupted
from .ranks import FAILURES, Ranks


def started_again(overwrite: bool) -> bool:
    """Whether torchrun has started this process anew after a failure (`--max-restarts`).

    Raises:
        ValueError: it was told to replace what there is, which would be its own work.
    """
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
    if again and overwrite:
        raise ValueError("started again by torchrun, --overwrite would replace this run itself: go on by --resume")
    return again


def run(main: Callable[[Sequence[str]], None], argv: Sequence[str]) -> int:
    """Runs a command. Of several processes, the first alone says what went wrong.

    Args:
        main: the command.
        argv: its arguments.

    Returns:
        The exit status: 0; 2 for an error that a person can set right; 128 plus the number of the signal that ended it.
    """
    ranks = Ranks()
    try:
        main(argv)
    except KeyboardInterrupt:
        return 130
    except Interrupted as interrupted:
        message, status = str(interrupted), 128 + interrupted.signum
    except FAILURES as error:
        message, status = f"error: {error}", 2
    else:
        message, status = "", 0
    if message and ranks.main:
        print(message, file=sys.stderr)
    if status != 2:  # after an error the others may be gone, or wait for this one: they are told by its end
        ranks.leave()
    return status
