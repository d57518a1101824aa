"""Files of weights: safetensors with a digest and a record of the model in the header, and what timm reads.

The record of a file says which model to make. It comes from whoever made the file, so it is checked before it is used.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from timm.models import clean_state_dict, load_state_dict, model_entrypoint
from torch import Tensor

from .hierarchy import HierarchicalSSM
from .trunk import VisionSSM

RECORD, DIGEST = "vilonghorn", "vilonghorn_sha256"  # entries of the header
RECORD_TYPES: dict[str, tuple[Any, str]] = dict.fromkeys(("model", "weights"), (str, "a text"))
RECORD_TYPES |= dict(kwargs=(dict, "arguments by name"), epoch=(int, "a number"))
RECORD_TYPES |= dict.fromkeys(("top1", "top5", "loss"), ((int, float), "a number"))
MAX_DEPTH, MAX_NUMBER, MAX_ENTRIES = 1_000, 65_536, 1_000  # of a model that a record describes
MAX_CLASSES = 1_000_000
_OWN = {name for model in (VisionSSM, HierarchicalSSM) for name in signature(model).parameters}
_OWN = _OWN - {"device", "dtype"} | {"exportable"}
_FOREIGN = re.compile("pretrained|checkpoint|cache|file|url|hub|device")  # arguments of timm that read or download


def pack(tensors: Mapping[str, Tensor], record: Mapping[str, Any] | None = None) -> bytes:
    """The content of a safetensors file, which timm reads, of a state dict; `record` is saved in it as JSON."""
    tensors = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    header = {} if record is None else {RECORD: json.dumps(record)}
    data = save(tensors, {"format": "pt", **header, DIGEST: digest(tensors, header.get(RECORD, ""))})
    end = 8 + int.from_bytes(data[:8], "little")
    names = json.loads(data[8:end])
    names["__metadata__"] = dict(sorted(names["__metadata__"].items()))  # safetensors writes them in a random order
    text = json.dumps(names, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[end:]


def digest(tensors: Mapping[str, Tensor], record: str = "") -> str:
    """SHA-256 of the text of the record, then by name of name, dtype, shape and bytes of each tensor (on the CPU)."""
    found = hashlib.sha256(record.encode())
    for name, value in sorted(tensors.items()):
        found.update(json.dumps([name, str(value.dtype), list(value.shape)]).encode())
        found.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def read_weights(path: str | Path, tensors: bool = True) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """Reads a file of weights onto the CPU: safetensors, or a checkpoint of torch that timm reads.

    Returns the state dict, of safetensors without `tensors` empty, and the record or None. Raises FileNotFoundError, or
    ValueError if it is not such a file, its record is not a JSON object, or its tensors do not have its digest.
    """
    path = Path(path)
    if not path.is_file():  # opening a named pipe would wait for ever
        raise FileNotFoundError(f"there are no weights {path}: expected a file")
    if path.suffix == ".safetensors":
        return _read(path, tensors)
    try:
        return load_state_dict(str(path)), None
    except Exception as error:  # readers of other formats raise almost any error
        in_run = (path.parent / "config.yaml").is_file()
        reason = "give the run's directory" if in_run else one_line(error)
        raise ValueError(f"{path} is not a file of weights ({reason})") from error


def check_file(path: str | Path) -> None:
    """Raises ValueError if a file that timm is going to read has a digest that its tensors do not have.

    In a folder, the file is that of `timm.models.save_for_hf`. Files of other formats and programs pass.
    """
    path = Path(path)
    path = path / "model.safetensors" if path.is_dir() else path
    if path.suffix == ".safetensors" and path.is_file():
        _read(path)


def one_line(error: Exception) -> str:
    """An error's type and message in one line, for use in another message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _read(path: Path, tensors: bool = True) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    try:
        with safe_open(path, "pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()} if tensors else {}
            header = file.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file, or is damaged: {one_line(error)}") from error
    try:
        record = json.loads(header.get(RECORD, "null"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} has a record of a run that cannot be read: {one_line(error)}") from error
    if not isinstance(record, dict | None):
        raise ValueError(f"{path} has a record of a run that cannot be read: it is a {type(record).__name__}")
    # A file with a record has a digest, too. A key that is almost the digest's name is that name, damaged.
    if DIGEST not in header and (record is not None or get_close_matches(DIGEST, header, cutoff=0.9)):
        raise ValueError(f"{path} is damaged: its header has no digest of the weights; copy it again")
    if tensors and header.get(DIGEST, (found := digest(weights, header.get(RECORD, "")))) != found:
        raise ValueError(f"{path} is damaged: its weights do not have the digest in its header; copy it again")
    for key, value in (record or {}).items():
        types, expected = RECORD_TYPES.get(key, (object, ""))
        if not isinstance(value, types):
            raise ValueError(f"{path} has a record of a run with {key} {str(value)[:80]!r}, expected {expected}")
    return clean_state_dict(weights), record


def check_architecture(name: Any, kwargs: Any, source: str | Path, weights: Mapping[str, Tensor] | None = None) -> None:
    """Checks the model that a file describes, so that making it downloads nothing and takes no more than its weights.

    The name is in timm's registry: other names download. A model of this library has the arguments of its class only,
    and no more parameters than the state dict `weights` of the file (None: not compared). Numbers are at most 65,536
    (1,000 blocks, 1,000,000 classes), and texts are plain names. Else raises ValueError, which names the `source`.
    """
    if not isinstance(name, str) or not isinstance(kwargs, dict):
        raise ValueError(f"{source} does not describe a model: expected a name and its arguments")
    if ":" in name:
        remedy = f"if you trust it, give {name} as the model and the file by --checkpoint"
        raise ValueError(f"{source} names the model {name}, which timm would download: {remedy}")
    if not timm.is_model(name):
        raise ValueError(f"{source} names the model {name!r}, which timm does not know")
    ours = is_ours(name)
    for key, value in kwargs.items():
        if key not in _OWN if ours else _FOREIGN.search(key):
            raise ValueError(f"{source} gives {name} the argument {key!r}, which a file of weights may not give")
        for entry in _entries(value):
            if isinstance(entry, str) and not re.fullmatch(r"[\w.-]*", entry):
                raise ValueError(f"{source} gives {name} {key}={entry[:100]!r}, expected a plain name")
    check_numbers(name, kwargs, source)
    if ours and weights is not None:
        try:
            model = timm.create_model(name, **kwargs, device="meta")
        except Exception as error:  # nearly any, of arguments of wrong types
            raise ValueError(f"{source} describes no {name} that can be made ({one_line(error)})") from error
        expected, found = (sum(value.numel() for value in state.values()) for state in (model.state_dict(), weights))
        if expected > found:
            raise ValueError(f"{source} describes a {name} of {expected:,} numbers, but contains {found:,}")


def check_numbers(name: str, kwargs: Mapping[Any, Any], source: str | Path) -> None:
    """Raises ValueError if an argument of a model has a number above its limit, with which making it would not end."""
    for key, value in kwargs.items():
        limit = MAX_DEPTH if "depth" in str(key) else MAX_CLASSES if key == "num_classes" else MAX_NUMBER
        for entry in _entries(value):
            if isinstance(entry, (int, float)) and not abs(entry) <= limit:
                raise ValueError(f"{source} gives {name} {key}={entry}, expected at most {limit:,}")


def is_ours(name: str) -> bool:
    """Whether this is the name of a registered model of this library, with or without a tag."""
    return timm.is_model(name) and model_entrypoint(name).__module__.startswith("vilonghorn.")


def _entries(value: Any) -> Iterator[Any]:
    """The scalars of nested JSON; at most `MAX_ENTRIES`."""
    pending = [value]
    for count, value in enumerate(pending):  # which grows
        if count == MAX_ENTRIES:
            yield float("inf")
            return
        if isinstance(value, dict):
            pending += [*value, *value.values()]
        elif isinstance(value, list):
            pending += value
        else:
            yield value
