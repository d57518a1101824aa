"""Files of weights, and state dicts that a model is going to load.

A file is safetensors with a digest of its tensors and a record of the model in the header, or what timm reads. The
record says which model to make. It comes from whoever made the file, so it is checked before it is used.
"""

import hashlib
import json
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import Any, get_type_hints

import timm
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from timm.layers import to_2tuple
from timm.models import clean_state_dict, load_state_dict, model_entrypoint
from torch import Tensor, nn

RECORD, DIGEST = "vilonghorn", "vilonghorn_sha256"  # entries of the header
RECORD_TYPES: dict[str, tuple[Any, str]] = dict.fromkeys(("model", "weights"), (str, "a text"))
RECORD_TYPES |= dict(kwargs=(dict, "arguments by name"), data=(dict, "options by name"), epoch=(int, "a number"))
RECORD_TYPES |= dict.fromkeys(("top1", "top5", "loss"), ((int, float), "a number"))
# Of a model that a record describes, for the sum of an argument's numbers: blocks, classes, sides in pixels, others.
LIMITS = (("depth|layers|blocks", 1_000), ("num_classes", 1_000_000), ("img_size|input_size", 20_000), ("", 65_536))
MAX_ENTRIES, MAX_PARAMETERS = 1_000, 1_000_000_000
_FOREIGN = re.compile("pretrained|checkpoint|cache|file|url|hub|device")  # arguments of timm that read or download
MAX_LISTED = 3  # mismatches that an error names
ADVICE = "give a state dict of float tensors, alone or under 'model' or 'state_dict'"
# Classes and `model_type`s of transformers 5.23 that take a backbone and rename `out_proj`.
TRANSFORMERS_KINDS = ("DetrModel", "rt_detr", "rt_detr_v2", "d_fine")


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
        open(path, "rb").close()  # names why a file cannot be opened; safetensors says that there is none
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
    and no more parameters than the state dict `weights` of the file (None: than 10^9). Numbers are within `LIMITS`, and
    texts are plain names. Else raises ValueError, which names the `source`.
    """
    if not isinstance(name, str) or not isinstance(kwargs, dict):
        raise ValueError(f"{source} does not describe a model: expected a name and its arguments")
    if ":" in name:
        remedy = f"if you trust it, give {name} as the model and the file by --checkpoint"
        raise ValueError(f"{source} names the model {name}, which timm would download: {remedy}")
    if not timm.is_model(name):
        raise ValueError(f"{source} names the model {name!r}, which timm does not know")
    if ours := is_ours(name):
        model_cls = get_type_hints(model_entrypoint(name))["return"]
        own = signature(model_cls).parameters.keys() - {"device", "dtype"} | {"exportable"}
    for key, value in kwargs.items():
        if key not in own if ours else _FOREIGN.search(key):
            raise ValueError(f"{source} gives {name} the argument {key!r}, which a file of weights may not give")
        for entry in _entries(value):
            if isinstance(entry, str) and not re.fullmatch(r"[\w.-]*", entry):
                raise ValueError(f"{source} gives {name} {key}={entry[:100]!r}, expected a plain name")
    check_numbers(name, kwargs, source)
    if ours:
        try:
            model = timm.create_model(name, **kwargs, device="meta")
        except Exception as error:  # nearly any, of arguments of wrong types
            raise ValueError(f"{source} describes no {name} that can be made ({one_line(error)})") from error
        limit = MAX_PARAMETERS if weights is None else sum(value.numel() for value in weights.values())
        if (numbers := sum(value.numel() for value in model.state_dict().values())) > limit:
            most = "expected at most" if weights is None else "but contains"
            raise ValueError(f"{source} describes a {name} of {numbers:,} numbers, {most} {limit:,}")


def check_numbers(name: str, kwargs: Mapping[Any, Any], source: str | Path) -> None:
    """Raises ValueError if the numbers of an argument have a sum above its limit: making the model would not end."""
    for key, value in kwargs.items():
        limit = next(limit for pattern, limit in LIMITS if re.search(pattern, str(key)))
        entries = [*_entries(value)]
        total = sum(min(abs(entry), limit + 1) for entry in entries if isinstance(entry, (int, float)))
        if len(entries) > MAX_ENTRIES or not total <= limit:
            most = f"expected at most {limit:,} in sum, in {MAX_ENTRIES:,} entries"
            raise ValueError(f"{source} gives {name} {key}={str(value)[:100]}, {most}")


def recorded_input_size(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The entry `input_size` of `pretrained_cfg`, which tells timm the grid of the positions in weights.

    `kwargs` are the recorded arguments of the model. Empty if they have no `img_size`.
    """
    size = kwargs.get("img_size")
    return {} if size is None else {"input_size": (kwargs.get("in_chans", 3), *to_2tuple(size))}


def is_ours(name: str) -> bool:
    """Whether this is the name of a registered model of this library, with or without a tag."""
    return timm.is_model(name) and model_entrypoint(name).__module__.startswith("vilonghorn.")


def _entries(value: Any) -> Iterator[Any]:
    """The scalars of nested JSON."""
    pending = [value]
    for value in pending:  # which grows
        if isinstance(value, dict):
            pending += [*value, *value.values()]
        elif isinstance(value, (list, tuple)):
            pending += value
        else:
            yield value


def unwrap_state_dict(checkpoint: dict[str, Any]) -> dict[str, Tensor]:
    """The state dict of a training checkpoint (under "model" or "state_dict"), without wrappers' prefixes ("module.").

    Raises ValueError for another object, a value that is not a tensor in memory, or a tensor that is not finite.
    """
    for key in ("model", "state_dict"):
        if isinstance(checkpoint, dict) and isinstance(checkpoint.get(key), dict):
            checkpoint = checkpoint[key]
    if not isinstance(checkpoint, dict) or not all(isinstance(name, str) for name in checkpoint):
        raise ValueError(f"this checkpoint is not a dictionary of tensors by name; {ADVICE}")
    state_dict = clean_state_dict(checkpoint)
    state_dict.pop("n_averaged", None)  # of torch's AveragedModel, which is a wrapper, too
    others = [f"{name} is {_form(value)}" for name, value in state_dict.items() if not _is_in_memory(value)]
    if others:
        raise ValueError(f"this checkpoint has values that are not tensors in memory: {_some(others)}; {ADVICE}")
    if wrong := [name for name, value in state_dict.items() if is_float(value) and not value.isfinite().all()]:
        found = f"{len(wrong)} of {len(state_dict)} tensors of this checkpoint hold NaN or infinity ({_some(wrong)})"
        raise ValueError(f"{found}; expected finite weights; take an earlier checkpoint")
    return state_dict


def fit_state_dict(state_dict: Mapping[str, Tensor], model: nn.Module, with_head: bool) -> dict[str, Tensor]:
    """Checks names, shapes and dtypes against the model's, except what timm adapts: head and input channels.

    A mask token that only the checkpoint has is left out; a model keeps its own where the checkpoint has none. Without
    `with_head`, as for a feature extractor, any head, or none, fits. Raises ValueError for what does not.
    """
    fitted = dict(state_dict)
    if model.mask_token is None:
        fitted.pop("mask_token", None)
    else:
        fitted.setdefault("mask_token", model.mask_token.detach())  # type: ignore[operator]
    expected = {name: _form(value) for name, value in model.state_dict().items()}
    given = {name: _form(value) for name, value in fitted.items()}
    cfg, adapted = getattr(model, "pretrained_cfg", {}), set()
    if not with_head or model.num_classes != cfg.get("num_classes", model.num_classes):
        adapted |= {f"{cfg['classifier']}.weight", f"{cfg['classifier']}.bias"}
    if model.in_chans != cfg.get("input_size", (model.in_chans,))[0]:
        adapted.add(f"{cfg['first_conv']}.weight")
    wrong = [
        f"{name} is {given.get(name, 'missing')}, expected {expected.get(name, 'no such name')}"
        for name in expected | given
        if given.get(name) != expected.get(name) and name not in adapted
    ]
    if wrong:
        remedy = "Make the model with the rule, sizes and number of classes of the checkpoint"
        prefixes = Counter({"": len(expected) // 2})  # '' unless more than half of the names have another
        prefixes.update(n.removesuffix(end) for n in state_dict for end in expected if f".{n}".endswith(f".{end}"))
        [(prefix, _)] = prefixes.most_common(1)
        if prefix:
            are_all = all(name.startswith(prefix) for name in state_dict)
            which, end = ("All names", "") if are_all else ("The model's names", f" if name.startswith({prefix!r})")
            remedy = f"{which} start with {prefix!r}: load {{name.removeprefix({prefix!r}): t for name, t in ...{end}}}"
        unknown = [text for text in wrong if text.endswith("no such name")][:1]
        raise ValueError(
            f"this checkpoint does not fit the model: {len(wrong)} mismatches "
            f"({_some([*dict.fromkeys((wrong[0], *unknown, *wrong))], '; ')}); "
            f"{len(expected.items() & given.items())} of {len(expected)} parameters fit. {remedy}"
        )
    return fitted


def _is_in_memory(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta


def is_float(value: Tensor) -> bool:
    """Whether a tensor has floats of 16 bits or more."""
    return value.is_floating_point() and value.dtype.itemsize > 1


def _form(value: Any) -> str:
    """The shape of a tensor, with its dtype if that is not a float of 16 bits or more; the type of other objects."""
    if not isinstance(value, Tensor):
        return f"of type {type(value).__name__}"
    return str(tuple(value.shape)) + ("" if is_float(value) else f" of {value.dtype}")


def _some(items: list[str], separator: str = ", ") -> str:
    return separator.join(items[:MAX_LISTED]) + (f"{separator}..." if len(items) > MAX_LISTED else "")


def keep_names_in_transformers() -> None:
    """Prevents transformers from renaming the parameters of our backbones when it loads a detector, in this process.

    transformers 5 renames every `out_proj` of a checkpoint of DETR and similar models to `o_proj`. Mixers have an
    `out_proj` too, and would lose it with only a warning. A feature extractor calls this when it is made, before
    transformers loads its weights. Without effect if transformers is not imported.
    """
    mapping = sys.modules.get("transformers.conversion_mapping")  # which loading and saving need
    if mapping is None:
        return
    try:
        get, register = mapping.get_checkpoint_conversion_mapping, mapping.register_checkpoint_conversion_mapping
        renaming = mapping.WeightRenaming
    except AttributeError as error:
        warnings.warn(f"this transformers may lose out_proj of the backbone on loading: {error}", stacklevel=2)
        return
    for kind in TRANSFORMERS_KINDS:
        entries = get(kind) or []
        for i, entry in enumerate(entries):
            if type(entry) is renaming and entry.source_patterns == ["out_proj"]:
                entries[i] = renaming(r"(?<!mixer\.)out_proj", entry.target_patterns)
                register(kind, entries, overwrite=True)
