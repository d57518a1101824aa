"""Atomic writing of files and folders: written beside the target, flushed to the disk, then renamed to it."""

import errno
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, Any, Literal

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

# Errors of file systems that lack an operation, such as CIFS, FUSE and the shared folders of virtual machines.
UNSUPPORTED = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK})


@contextmanager
def exits_on_sigterm() -> Iterator[None]:
    """Inside, SIGTERM raises SystemExit, so that blocks end and remove their files, unless it has another handler.

    A second SIGTERM does not interrupt this. Processes that are forked inside end at once, as without it.
    A handler that is set inside stays.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield  # only the main thread can set a handler
        return
    process, ends = os.getpid(), False

    def end(signum: int, frame: FrameType | None) -> None:
        nonlocal ends
        if os.getpid() != process:
            signal.signal(signum, signal.SIG_DFL)  # a fork: the files are not its own
            os.kill(os.getpid(), signum)
        elif not ends:
            ends = True
            sys.exit(128 + signum)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def atomic_writes(*paths: Path, mode: Literal["wb", "w"] = "wb") -> Iterator[list[IO[Any]]]:
    """As `atomic_write`, for several files of one folder: all are on the disk before the first is renamed.

    The first is renamed last. Meanwhile, and after a kill or an error in between, its old version is `NAME.PID.old`:
    never beside new others.
    """
    for path in paths:
        check_is_file(path)
    encoding = None if mode == "wb" else "utf-8"
    partials = [path.with_name(f"{path.name}.{os.getpid()}.partial") for path in paths]
    old = paths[0].with_name(f"{paths[0].name}.{os.getpid()}.old")
    with exits_on_sigterm():
        try:
            with named_errors(paths[0]):
                with ExitStack() as stack:
                    opened = (open(partial, f"{mode}+", encoding=encoding) for partial in partials)
                    files = [stack.enter_context(file) for file in opened]
                    yield files
                    for file in files:
                        file.flush()
                        sync(file.fileno())
                if len(paths) > 1 and paths[0].exists():
                    os.replace(paths[0], old)
                for partial, path in reversed([*zip(partials, paths)]):
                    os.replace(partial, path)
                sync_folder(paths[0].parent)
        finally:
            unchanged = all(partial.exists() for partial in partials)  # no new file is in its place
            if unchanged and old.exists() and not paths[0].exists():
                os.replace(old, paths[0])
            for leftover in [*partials, old] if paths[0].exists() else partials:
                leftover.unlink(missing_ok=True)


@contextmanager
def atomic_write(path: str | os.PathLike, mode: Literal["wb", "w"] = "wb") -> Iterator[IO[Any]]:
    """Opens `NAME.PID.partial` beside `path` for writing, and renames it to `path` when the block ends without error.

    The folder exists. A reader sees the old file or the complete new one, also after a crash of the machine. A block
    that raises, or that a signal ends, leaves the old file and removes the partial one; a killed process leaves both.
    Mode "w" is for UTF-8 text. The file can be read back, too. A folder, a device or a pipe is a FileExistsError.
    """
    with atomic_writes(Path(path), mode=mode) as (file,):
        yield file


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

    Folders above it that are missing are made, too. A block that raises, or that a signal ends, leaves nothing else; a
    killed process leaves the partial folder. A `path` that is a link, or not an empty folder, is a FileExistsError.
    """
    path = Path(path)
    if path.is_symlink() or path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise FileExistsError(f"{path}: exists; remove it or give another name")
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with exits_on_sigterm():
        try:
            with named_errors(path):
                partial.mkdir(parents=True)
                yield partial
                if hasattr(os, "sync"):
                    os.sync()
                os.rename(partial, path)
                sync_folder(path.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """Locks a file beside `path`; the system releases the lock if the process is killed.

    Raises FileExistsError if it is locked already, and FileNotFoundError if the folder of `path` does not exist.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent}: no such folder to write {path.name} into; make it first")
    beside = path.with_name(f"{path.name}.lock")
    if (file := lock(beside, inherited=True)) is None:
        raise FileExistsError(f"{path}: is being written by another process; wait, or give another name")
    with exits_on_sigterm():
        try:
            yield
        finally:
            file.close()
            beside.unlink(missing_ok=True)


def lock(path: Path, inherited: bool = False) -> IO[bytes] | None:
    """Opens and locks a file, until it is closed or the process ends. Returns None if it is locked already.

    With `inherited`, a second call in this process is refused, too, and processes that this one forks keep the lock.
    Windows and file systems without locks do not lock.
    """
    check_is_file(path)
    file = open(path, "ab")
    try:
        if fcntl is not None:
            (fcntl.flock if inherited else fcntl.lockf)(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            file.close()
            return None
        if error.errno not in UNSUPPORTED:
            raise
    return file


def check_is_file(path: Path) -> None:
    """Raises FileExistsError for a folder, a device, which a rename would replace, or a pipe, which would block."""
    if path.exists() and not path.is_file():
        raise FileExistsError(f"{path} is not a file: remove it, or give another name")


@contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Adds `path` to an OSError that names no file."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def explain_full_disk(path: Path, remedy: str) -> Iterator[None]:
    """Names the file that could not be written, and says what to do if the disk is full; `remedy` may name {path}."""
    try:
        with named_errors(path):
            yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        problem = f"the disk has no space left for {path}: free some space"
        raise OSError(f"{problem}, then {remedy.format(path=path)}") from error


def sync(descriptor: int) -> None:
    """Flushes an open file or folder to the disk, if its file system can."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise


def sync_folder(folder: Path) -> None:
    """Flushes a folder's entries to the disk, so that a rename in it survives a power failure."""
    if os.name == "posix" and os.access(folder, os.R_OK):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            sync(descriptor)
        finally:
            os.close(descriptor)
