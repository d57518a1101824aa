"""Files that are whole or not there: the full state of a run for resuming it, and plain weights for everyone else."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from ..data.files import sync_folder

FORMAT = 3
HEADER = f"vilonghorn state, format {FORMAT}\n".encode()  # before the SHA-256 of what torch saved, and that itself


@contextmanager
def space_needed(path: Path) -> Iterator[None]:
    """Says of a full disk what could not be written and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(
            f"the disk has no space left for {path}: free some space, then go on from the last checkpoint by "
            f"--resume {path.parent}"
        ) from error


def write_whole(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Writes a file so that whoever looks, whenever this process or the machine dies, finds the old one or the new.

    Args:
        path: where the file belongs.
        write: called with an open binary file, beside `path`, that takes its place once it is on the disk.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with space_needed(path), open(partial, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def keep(path: Path, as_path: Path) -> None:
    """Gives a file a second name, which replaces whatever had it and stays when the first name goes to another file."""
    partial = as_path.with_name(f".{as_path.name}.partial")
    partial.unlink(missing_ok=True)
    try:
        os.link(path, partial)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS):
            raise
        write_whole(as_path, lambda file: file.write(path.read_bytes()))  # a file system without hard links
    else:
        os.replace(partial, as_path)


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Saves a state made of tensors, numbers, strings and containers of them."""
    buffer = BytesIO()  # torch would hide why a file cannot be written
    torch.save(state, buffer)
    digest = hashlib.sha256(buffer.getbuffer()).digest()
    write_whole(path, lambda file: file.writelines([HEADER, digest, buffer.getbuffer()]))


def load_state(path: Path) -> dict[str, Any]:
    """Loads what `save_state` wrote, onto the CPU, without running any code that the file may hold.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not such a state, is damaged, or is another version's.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} holds no {path.name}, so there is no run to resume in it")
    with open(path, "rb") as file:
        header, digest, data = file.read(len(HEADER)), file.read(hashlib.sha256().digest_size), file.read()
    if header != HEADER:
        raise ValueError(f"{path} is not the state of a run that this version of vilonghorn reads (format {FORMAT})")
    if hashlib.sha256(data).digest() != digest:
        raise ValueError(f"{path} is damaged: its checksum is wrong; resume from a copy of it, or start anew")
    try:
        state = torch.load(BytesIO(data), map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} is not the state of a run: torch cannot read it") from error
    if not isinstance(state, dict):
        raise ValueError(f"{path} is not the state of a run: it holds a {type(state).__name__}")
    return state


def save_weights(path: Path, weights: dict[str, torch.Tensor], record: dict[str, Any]) -> None:
    """Saves a state dict as safetensors, which `timm.create_model(..., checkpoint_path=path)` reads.

    Args:
        path: the file.
        weights: a module's state dict.
        record: what to know about the weights, kept as JSON in the file's header.
    """
    tensors = {name: value.detach().cpu().contiguous() for name, value in weights.items()}
    data = save(tensors, {"vilonghorn": json.dumps(record)})
    write_whole(path, lambda file: file.write(data))


def load_weights(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Loads what `save_weights` wrote: the state dict, on the CPU, and the record.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not safetensors, or another program's.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there are no weights {path}")
    try:
        with safe_open(path, "pt") as file:
            record = (file.metadata() or {}).get("vilonghorn")
            weights = {name: file.get_tensor(name) for name in file.keys()}
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from error
    try:
        record = json.loads(record or "")
    except ValueError as error:
        raise ValueError(f"{path} holds no record of the run that it comes from, so it is not one of ours") from error
    if not isinstance(record, dict):
        raise ValueError(f"{path} holds a record that is no mapping, so it is not one of ours")
    return weights, record
