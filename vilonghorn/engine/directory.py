"""The directory of a run: what is in it, that no run replaces another by mistake, and a log that resuming cuts back."""

from __future__ import annotations

import errno
import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import yaml

from .checkpoint import keep, load_state, save_state, save_weights, space_needed, write_whole

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

PARTS = frozenset("config data model ema optimizer scaler progress".split())  # of a state


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
        self.previous = self.path / "previous.pt"
        self.state_is_good = True  # as far as is known
        self.log_file = self.path / "log.jsonl"
        self.config = self.path / "config.yaml"
        self.environment = self.path / "environment.json"
        self.curves = self.path / "curves.png"
        self.predictions = self.path / "predictions.png"
        self.report = self.path / "report.html"
        self.events = self.path / "tensorboard"

    @property
    def holds_state(self) -> bool:
        """Whether there is a checkpoint to go on from."""
        return self.state.exists() or self.previous.exists()

    def load(self) -> dict[str, Any]:
        """The state of the run's last checkpoint, or of the one before where the last is damaged, which it warns of.

        Raises:
            FileNotFoundError: the directory holds none.
            ValueError: none can be read.
        """
        try:
            return self.read(self.state)
        except (FileNotFoundError, ValueError) as error:
            if not self.previous.exists():
                raise
            state = self.read(self.previous)
            self.state_is_good = False
            warnings.warn(f"{error}. Going on from the checkpoint before it, {self.previous.name}", stacklevel=2)
            return state

    def read(self, file: Path) -> dict[str, Any]:
        """The state in a file of this directory."""
        state = load_state(file)
        sections = state.get("config") if PARTS <= state.keys() else None
        if not isinstance(sections, dict) or not all(isinstance(section, dict) for section in sections.values()):
            raise ValueError(f"{file} is not the state of a run: it must hold {', '.join(sorted(PARTS))}")
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

    def refuse_if_taken(self, but_started: bool = False) -> None:
        """Raises FileExistsError if the directory holds a run, or any file that a run would write over.

        Args:
            but_started: allow what a run leaves that was killed before its first checkpoint.
        """
        if self.holds_state:
            raise FileExistsError(
                f"{self.path} holds a run: go on with it by --resume {self.path}, choose another --run.dir, "
                "or replace it by --overwrite"
            )
        started = {self.config, self.environment, self.events} if but_started else set()
        if but_started and self.log_file.exists() and not self.log_file.stat().st_size:
            started.add(self.log_file)
        for file in (self.config, self.environment, *self.results):
            if file.exists() and file not in started:
                raise FileExistsError(
                    f"{self.path} holds a {file.name}, which a run would write over: choose another --run.dir, or "
                    "replace it by --overwrite"
                )

    @property
    def results(self) -> tuple[Path, ...]:
        """What only training makes; all are files, but for the folder of the events."""
        weights = self.weights("last"), self.weights("best")
        pictures = self.curves, self.predictions, self.report
        refused = self.path.glob("nonfinite-*.safetensors")
        return self.state, self.previous, *weights, self.log_file, *pictures, *refused, self.events

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
                if file == self.events:
                    shutil.rmtree(file, ignore_errors=True)
                else:
                    file.unlink(missing_ok=True)
        write_whole(self.config, lambda file: file.write(yaml.safe_dump(config, sort_keys=False).encode()))
        write_whole(self.environment, lambda file: file.write(json.dumps(environment, indent=2).encode() + b"\n"))
        self.log = Log(self.log_file, log_size or 0)

    def save(self, state: dict[str, Any]) -> None:
        """Replaces the run's state, and keeps the one before."""
        if self.state.exists() and self.state_is_good:
            keep(self.state, self.previous)
        save_state(self.state, state)
        self.state_is_good = True

    def weights(self, checkpoint: str) -> Path:
        """The file of the "last" or "best" weights."""
        return self.path / f"{checkpoint}.safetensors"

    def save_weights(self, checkpoint: str, module: torch.nn.Module, record: dict[str, Any]) -> None:
        """Replaces the "last" or "best" weights and what is recorded of them."""
        save_weights(self.weights(checkpoint), module.state_dict(), record)

    def save_refused(self, rank: int, loss: float, images: torch.Tensor, targets: torch.Tensor) -> Path:
        """Saves what a process was to learn from, with loss or gradient not finite, as the model saw it.

        Args:
            rank: the process.
            loss: its own.
            images: (B, 3, H, W), normalised and mixed.
            targets: (B,) labels, or (B, classes) probabilities.
        """
        file = self.path / f"nonfinite-{rank}.safetensors"
        self.path.mkdir(parents=True, exist_ok=True)
        save_weights(file, {"images": images, "targets": targets}, {"loss": str(loss)})
        return file
