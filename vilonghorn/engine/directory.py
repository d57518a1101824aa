"""The directory of a run: what is in it, that no run replaces another by mistake, and a log that resuming cuts back."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import torch
import yaml

from .checkpoint import load_state, save_state, save_weights, space_needed, write_whole

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

PARTS = frozenset("config data model ema optimizer progress".split())  # of a state


class Log:
    """A file of JSON lines that can be cut back to where a checkpoint was taken.

    Args:
        path: the file.
        size: bytes to keep of what is there.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.file = open(path, "ab")
        self.file.truncate(min(size, self.file.tell()))

    def write(self, **record: Any) -> None:
        """Appends one line."""
        with space_needed(self.path):
            self.file.write(json.dumps(record).encode() + b"\n")
            self.file.flush()

    def sync(self) -> int:
        """Brings the lines to the disk and returns their size in bytes, for a checkpoint to note."""
        os.fsync(self.file.fileno())
        return self.file.seek(0, os.SEEK_END)

    def records(self) -> list[dict[str, Any]]:
        """Every line so far."""
        return [json.loads(line) for line in self.path.read_bytes().splitlines()]


class RunDirectory:
    """Paths of a run's files, and the writing of those that are not pictures.

    Args:
        path: the directory; it need not exist.

    Raises:
        NotADirectoryError: `path` is a file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if self.path.is_file():
            raise NotADirectoryError(f"{path} is a file: choose a directory for --run.dir")
        self.state = self.path / "last.pt"
        self.log_file = self.path / "log.jsonl"
        self.config = self.path / "config.yaml"
        self.environment = self.path / "environment.json"
        self.curves = self.path / "curves.png"
        self.predictions = self.path / "predictions.png"

    def load(self) -> dict[str, Any]:
        """The state of the run's last checkpoint.

        Raises:
            FileNotFoundError: the directory holds none.
            ValueError: it cannot be read.
        """
        state = load_state(self.state)
        sections = state.get("config") if PARTS <= state.keys() else None
        if not isinstance(sections, dict) or not all(isinstance(section, dict) for section in sections.values()):
            raise ValueError(f"{self.state} is not the state of a run: it must hold {', '.join(sorted(PARTS))}")
        return state

    def lock(self) -> None:
        """Keeps other processes from training here, until this object or its process ends, however it ends.

        A record lock, unlike flock, is not inherited by processes that decode images and may outlive a killed run.

        Raises:
            BlockingIOError: another process is training here.
        """
        if fcntl is None:
            return
        self.locked = open(self.path / ".lock", "ab")
        try:
            fcntl.lockf(self.locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise BlockingIOError(
                    f"another process is training in {self.path}: wait for its end, or choose another --run.dir"
                ) from error
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP):  # file systems without locks
                raise

    def refuse_if_taken(self) -> None:
        """Raises FileExistsError if the directory holds a run, or any file that a run would write over."""
        if self.state.exists():
            raise FileExistsError(
                f"{self.path} holds a run: go on with it by --resume {self.path}, choose another --run.dir, "
                "or replace it by --overwrite"
            )
        for file in (self.config, self.environment, *self.results):
            if file.exists():
                raise FileExistsError(
                    f"{self.path} holds a {file.name}, which a run would write over: choose another --run.dir, or "
                    "replace it by --overwrite"
                )

    @property
    def results(self) -> tuple[Path, ...]:
        """The files that only training makes."""
        weights = self.weights("last"), self.weights("best")
        return self.state, *weights, self.log_file, self.curves, self.predictions

    def open(self, config: dict[str, Any], environment: dict[str, Any], log_size: int | None) -> None:
        """Makes the directory what a run starts from.

        Args:
            config: resolved configuration.
            environment: what else the run depends on.
            log_size: bytes of the log that the checkpoint to go on from covers, in a directory locked before that was
                loaded; None: start anew, without the files of a former run.
        """
        if log_size is None:
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock()
            for file in self.results:
                file.unlink(missing_ok=True)
        write_whole(self.config, lambda file: file.write(yaml.safe_dump(config, sort_keys=False).encode()))
        write_whole(self.environment, lambda file: file.write(json.dumps(environment, indent=2).encode() + b"\n"))
        self.log = Log(self.log_file, log_size or 0)

    def save(self, state: dict[str, Any]) -> None:
        """Replaces the run's state."""
        save_state(self.state, state)

    def weights(self, checkpoint: str) -> Path:
        """The file of the "last" or "best" weights."""
        return self.path / f"{checkpoint}.safetensors"

    def save_weights(self, checkpoint: str, module: torch.nn.Module, record: dict[str, Any]) -> None:
        """Replaces the "last" or "best" weights and what is recorded of them."""
        save_weights(self.weights(checkpoint), module.state_dict(), record)
