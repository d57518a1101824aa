"""Files that are whole or not there: written beside the target, flushed to the disk, then renamed over it.

What is written, and whether a target may be replaced at all, is the caller's business.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Opens a file beside `path` for writing, and puts it in the place of `path` when the block ends without an error.

    A block that raises leaves `path` as it was and nothing beside it; a process killed inside the block leaves
    `path` as it was and the unfinished `NAME.PID.partial`.

    Args:
        path: the final name; its folder exists.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flushes a folder's entries to the disk, so that a rename in it outlives a power cut."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
