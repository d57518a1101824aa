"""The directory of a run: what is in it, that no run replaces another by mistake, and a log that resuming cuts back."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import yaml

from .checkpoint import load_state, save_state, save_weights, write_whole


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
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.state = self.path / "last.pt"
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
        return load_state(self.state)

    def refuse_if_taken(self) -> None:
        """Raises FileExistsError if the directory holds a run."""
        if self.state.exists():
            raise FileExistsError(
                f"{self.path} holds a run: go on with it by --resume {self.path}, choose another --run.dir, "
                "or replace it by --overwrite"
            )

    def open(self, config: dict[str, Any], environment: dict[str, Any], log_size: int | None) -> None:
        """Makes the directory what a run starts from.

        Args:
            config: resolved configuration.
            environment: what else the run depends on.
            log_size: bytes of the log that the checkpoint to go on from covers; None: start anew, without the files
                of a former run.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        log = self.path / "log.jsonl"
        if log_size is None:
            weights = [self.weights("last"), self.weights("best")]
            for file in (self.state, *weights, log, self.curves, self.predictions):
                file.unlink(missing_ok=True)
        write_whole(self.config, lambda file: file.write(yaml.safe_dump(config, sort_keys=False).encode()))
        write_whole(self.environment, lambda file: file.write(json.dumps(environment, indent=2).encode() + b"\n"))
        self.log = Log(log, log_size or 0)

    def save(self, state: dict[str, Any]) -> None:
        """Replaces the run's state."""
        save_state(self.state, state)

    def weights(self, checkpoint: str) -> Path:
        """The file of the "last" or "best" weights."""
        return self.path / f"{checkpoint}.safetensors"

    def save_weights(self, checkpoint: str, module: torch.nn.Module, record: dict[str, Any]) -> None:
        """Replaces the "last" or "best" weights and what is recorded of them."""
        save_weights(self.weights(checkpoint), module.state_dict(), record)
