"""Atomic writing of files and folders: written beside the target, flushed to the disk, then renamed to it."""

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Literal

import filelock


@contextmanager
def atomic_write(path: str | os.PathLike, mode: Literal["wb", "w"] = "wb") -> Iterator[IO[Any]]:
    """Opens `NAME.PID.partial` beside `path` for writing, and renames it to `path` when the block ends without error.

    A reader sees the old file or the complete new one, also after a crash of the machine. A block that raises leaves
    the old file and removes the partial one. A process that is killed inside the block leaves both.

    Args:
        path: the final name; its folder exists.
        mode: "wb" for bytes (the default), "w" for UTF-8 text. The file can be read back, too.
    """
    path = Path(path)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, f"{mode}+", encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_json(path: str | os.PathLike, values: Mapping[str, Any]) -> None:
    """Writes a JSON object by `atomic_write`: a line for each entry, and in lists of objects a line for each object."""

    def text(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False)

    def lines(value: Any) -> str:
        rows = isinstance(value, list) and value and all(isinstance(row, Mapping) for row in value)
        return "[\n  " + ",\n  ".join(map(text, value)) + "\n ]" if rows else text(value)

    with atomic_write(path, "w") as file:
        file.write("{\n" + ",\n".join(f" {text(key)}: {lines(value)}" for key, value in values.items()) + "\n}\n")


@contextmanager
def atomic_folder(path: str | os.PathLike) -> Iterator[Path]:
    """Makes the folder `NAME.PID.partial` beside `path`, and renames it to `path` when the block ends without error.

    Folders above it that are missing are made, too. A block that raises leaves nothing else. A process that is killed
    inside the block leaves the partial folder.

    Raises:
        FileExistsError: `path` exists.
    """
    path = Path(path)
    if path.exists():
        raise FileExistsError(f"{path}: exists; remove it or give another name")
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        yield partial
        if hasattr(os, "sync"):
            os.sync()
        os.rename(partial, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    sync_folder(path.parent)


@contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """Locks a file beside `path`; the system releases the lock if the process is killed.

    Raises:
        FileExistsError: another process has locked it.
        FileNotFoundError: the folder of `path` does not exist.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent}: no such folder to write {path.name} into; make it first")
    lock = filelock.FileLock(path.with_name(f"{path.name}.lock"))
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        raise FileExistsError(f"{path}: is being written by another process; wait, or give another name") from None
    try:
        yield
    finally:
        with suppress(OSError):  # fails on Windows, where it is not needed
            os.unlink(lock.lock_file)
        lock.release()


@contextmanager
def explain_full_disk(path: Path, remedy: str) -> Iterator[None]:
    """Rewords the error of a full disk: which file could not be written, and what to do; `remedy` may name {path}."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(
            f"the disk has no space left for {path}: free some space, then {remedy.format(path=path)}"
        ) from error


def sync_folder(folder: Path) -> None:
    """Flushes a folder's entries to the disk, so that a rename in it survives a power failure."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
