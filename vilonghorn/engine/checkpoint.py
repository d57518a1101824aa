"""Checkpoints and the directory of a run. All files are written atomically."""

import hashlib
import json
import os
import pickle
import re
import shutil
import warnings
from contextlib import AbstractContextManager, suppress
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
import yaml

from ..data.atomic_files import atomic_write, explain_full_disk, lock, named_errors, sync
from ..data.image_file import printable
from ..models.weights_file import pack, read_weights
from .config import ClassNames, Config

FORMAT = 3
HEADER = f"vilonghorn state, format {FORMAT}\n".encode()  # followed by a SHA-256 and the data of torch.save
# There before the first checkpoint.
STARTED = ("config.yaml", "environment.json", "classes.txt", "tensorboard", "log.jsonl")
PICTURES = ("curves", "confusion", "confidence", "predictions", "reconstructions")
RESULTS = ("last.safetensors", "best.safetensors", "predictions.csv", "report.html", *(f"{n}.png" for n in PICTURES))


def full_disk_explained(path: Path) -> AbstractContextManager[None]:
    """Explains a full disk to the user of a run, one of whose files is at `path`."""
    is_resumable = (path.parent / "last.pt").exists()
    remedy = "resume from the last checkpoint: --resume {path.parent}" if is_resumable else "start again by --overwrite"
    return explain_full_disk(path, remedy)


def write_file(path: Path, *parts: bytes | memoryview) -> None:
    """Writes a file of a run atomically."""
    with full_disk_explained(path), atomic_write(path) as file:
        file.writelines(parts)


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Saves a state made of tensors, numbers, strings and containers of them."""
    buffer = BytesIO()  # torch.save to a file hides why it cannot be written
    torch.save(state, buffer)
    with buffer.getbuffer() as data:  # Python 3.12.1 crashes if the traceback of an error keeps this memory
        write_file(path, HEADER, hashlib.sha256(data).digest(), data)


def load_state(path: Path) -> dict[str, Any]:
    """Loads what `save_state` wrote, onto the CPU, without running code from the file."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path.name} in {path.parent}")
    remedy = f"start again by --overwrite, or from --model.weights {path.parent} in another --run.dir"
    with named_errors(path), open(path, "rb") as file:
        header, digest, data = file.read(len(HEADER)), file.read(hashlib.sha256().digest_size), file.read()
    if header != HEADER:
        raise ValueError(f"{path} is not the state of a run that this version reads (format {FORMAT}): {remedy}")
    if hashlib.sha256(data).digest() != digest:
        raise ValueError(f"{path} is damaged: its checksum is wrong; {remedy}")
    try:
        return torch.load(BytesIO(data), map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} is not the state of a run that torch reads: {remedy}") from error


def save_weights(path: Path, weights: dict[str, torch.Tensor], record: dict[str, Any]) -> None:
    """Saves a state dict as safetensors, which timm reads, with a record of facts about it and a digest."""
    write_file(path, pack(weights, record))


def load_weights(path: Path, *, tensors: bool = True) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The state dict, on the CPU and empty without `tensors`, and the record in a file of `save_weights`."""
    weights, record = read_weights(path, tensors)
    if record is None:
        raise ValueError(f"{path} has no record of a run: expected weights that a run of vilonghorn has saved")
    return weights, record


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a log, each with `kind`, "train" or "epoch". Leaves out lines that are damaged or incomplete."""
    records = []
    for line in path.read_bytes().splitlines():
        with suppress(ValueError, RecursionError):
            records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict) and "kind" in record]


class RunDirectory:
    """The files of a run. The directory need not exist."""

    def __init__(self, path: str | Path) -> None:
        self.path, self.lock_file = Path(path), None
        self.state = self.path / "last.pt"
        self.log_file = self.path / "log.jsonl"
        self.config = self.path / "config.yaml"
        self.environment = self.path / "environment.json"
        self.events = self.path / "tensorboard"

    def weights(self, checkpoint: str) -> Path:
        """The file of the "last" or "best" weights. Raises ValueError for another name."""
        if checkpoint not in ("best", "last"):
            what = f"{self.path} is the directory of a run"
            raise ValueError(f"--checkpoint is {checkpoint!r}, expected best or last: {what}")
        return self.path / f"{checkpoint}.safetensors"

    def records(self) -> dict[str, dict[str, Any]]:
        """The records of the "best" and "last" weights, as far as there are such files."""
        names = (name for name in ("best", "last") if self.weights(name).is_file())
        return {name: load_weights(self.weights(name), tensors=False)[1] for name in names}

    def lock(self) -> None:
        """Keeps other processes from training here, or raises BlockingIOError if one does."""
        self.lock_file = self.lock_file or lock(self.path / ".lock")  # decoders, which may survive, do not inherit it
        if self.lock_file is None:
            remedy = "wait until it ends, or choose another --run.dir"
            raise BlockingIOError(f"another process is training in {self.path}: {remedy}")

    def check_is_writable(self) -> None:
        """Raises OSError if the directory cannot be made or written to. Leaves nothing behind."""
        made = [folder for folder in (self.path, *self.path.parents) if not os.path.exists(folder)]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=self.path).close()
        except OSError as error:
            is_link = os.path.islink(self.path) and not os.path.exists(self.path)
            reason = "a broken link" if is_link else "a file" if os.path.isfile(self.path) else error.strerror
            raise type(error)(f"--run.dir is {self.path}, which cannot hold a run ({reason}): choose another") from None
        finally:
            for folder in made:
                with suppress(OSError):
                    folder.rmdir()

    def has_updates(self) -> bool:
        """Whether the state in the directory, if any, has an update. One that cannot be read has."""
        try:
            progress = load_state(self.state)["progress"] if self.state.exists() else {"epoch": 0, "batch": 0}
        except (ValueError, KeyError, TypeError):
            return True
        return bool(progress["epoch"] or progress["batch"])

    def check_is_free(self) -> None:
        """Raises FileExistsError if a run here has saved an update, or there is a file that a run would overwrite."""
        has_log = self.log_file.exists() and self.log_file.stat().st_size
        is_started = self.state.exists() or ((self.path / ".lock").exists() and not has_log)
        remedy = "choose another --run.dir, or replace it by --overwrite"
        if self.has_updates():
            raise FileExistsError(f"there is a run in {self.path}: resume it by --resume {self.path}, {remedy}")
        for name in RESULTS if is_started else (*STARTED, *RESULTS):
            if (self.path / name).exists():
                raise FileExistsError(f"there is a {name} in {self.path}, which a run would overwrite: {remedy}")

    def open(
        self, config: Config, environment: dict[str, Any], classes: ClassNames, log_size: int | None, overwrite: bool
    ) -> None:
        """Prepares the directory for training, and writes configuration, environment and names of the classes.

        A resumed run has locked it and keeps `log_size` bytes of its log. None: a new run, which deletes an old one.
        """
        if log_size is None:
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock()
            if not overwrite:  # again, because another process may have trained here before the lock
                self.check_is_free()
            shutil.rmtree(self.events, ignore_errors=True)
            for name in ("last.pt", "log.jsonl", *RESULTS):
                (self.path / name).unlink(missing_ok=True)
        written = "|".join(map(re.escape, ("last.pt", *STARTED, *RESULTS)))
        for partial in self.path.iterdir():  # of a run that was killed inside a write, not of an export into its folder
            if re.fullmatch(rf"({written}|teacher-.*)\.\d+\.partial", partial.name) and not partial.is_dir():
                partial.unlink()
        write_file(self.config, yaml.safe_dump(config.to_dict(), sort_keys=False).encode())
        write_file(self.environment, json.dumps(environment, indent=2).encode(), b"\n")
        if classes:  # for timm's --class-map: a line for each class, in the order of the model's scores
            lines = "".join(f"{printable(name)}\n" for name in classes)
            write_file(self.path / "classes.txt", lines.encode())
        self.log = open(self.log_file, "ab")
        if self.log.tell() < (log_size or 0):
            warnings.warn(f"{self.log_file} has lost lines: the curves of this run have a gap", stacklevel=2)
        self.log.truncate(min(log_size or 0, self.log.tell()))

    def write_log(self, **record: Any) -> None:
        """Appends a line of JSON to the log."""
        with full_disk_explained(self.log_file):
            self.log.write(json.dumps(record).encode() + b"\n")
            self.log.flush()

    def sync_log(self) -> int:
        """Flushes the log to the disk and returns its size in bytes, which a checkpoint records."""
        sync(self.log.fileno())
        return self.log.seek(0, os.SEEK_END)
