"""The command that trains: its options, and how it starts again, speaks and ends as one of torchrun's processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveFloat, PositiveInt

from .distributed import FAILURES, Ranks
from .interrupt import Interrupted


def add_run_options(parser: ArgumentParser) -> None:
    """Adds to the options of a configuration those that say what to do with it."""
    parser.add_argument("--resume", metavar="RUN", help="run directory to go on with, under its own configuration")
    parser.add_argument("--auto-resume", action="store_true", help="go on with the run of --run.dir if there is one")
    parser.add_argument("--overwrite", action="store_true", help="replace the run that --run.dir holds")
    parser.add_argument("--evaluate", metavar="RUN", help="run directory whose weights to measure, without training")
    parser.add_argument("--checkpoint", choices=["best", "last"], default="best", help="which weights --evaluate takes")
    parser.add_argument("--dry-run", action="store_true", help="print updates, memory and time of the run; no training")
    parser.add_argument("--processes", type=PositiveInt, default=8, help="of --dry-run: how many train together")
    parser.add_argument("--train-images", type=PositiveInt, help="of --dry-run: how many, where the data is not here")
    parser.add_argument("--images-per-second", type=PositiveFloat, help="of --dry-run: of one process; else measured")


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
