"""Reads what an exported file contains, without loading or running it. Nothing in the file is executed."""

import json
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

from ..data.images import printable
from .formats import FORMATS, kind_of, weights_digest
from .native import DOMAIN, INTERFACE

MAX_METADATA = 1 << 20  # bytes of an entry that describes the model
MAX_SIDE = 4096  # pixels of an image that is run
PARTS = {"pt2": "models/model.json", "aoti": ".so"}  # how the name of a member that each archive has ends
MACHINE_CODE = (".so", ".kernels", ".pyd", ".dll", ".dylib")


class RefusedFile(ValueError):
    """A file that `export` did not write, or a damaged one."""


class Contents(NamedTuple):
    """What a file contains."""

    kind: str  # of `FORMATS`
    metadata: dict[str, Any]  # of `formats.describe`, as far as the file has it
    members: dict[str, int]  # names of tensors (ONNX) or members of the archive, and their bytes
    digest: bool  # whether the file has checksums, which were compared
    problem: str | None = None  # why it cannot run with this installation


def read_contents(path: Path) -> Contents:
    """Reads a file of `vilonghorn export`, and compares the checksums of its weights.

    Raises:
        ValueError: a name that no format has, a file of another format, a damaged one, one that needs other files, or
            one that contains what `export` never writes.
        FileNotFoundError: there is no such file.
    """
    kind = kind_of(path)
    if kind is None:
        suffixes = ", ".join(form.suffix for form in FORMATS.values())
        raise ValueError(f"--check is {path}, expected a name that ends in one of {suffixes}")
    if not path.is_file():
        raise FileNotFoundError(f"--check is {path}, but there is no such file")
    try:
        return _read_onnx(path, kind) if FORMATS[kind].is_onnx else _read_archive(path, kind)
    except (RefusedFile, ImportError):
        raise
    except Exception as error:  # of every kind that parsers of a damaged file raise
        reason = printable(" ".join(str(error).split()))
        raise RefusedFile(f"{path} is not of the format {FORMATS[kind].title}, or is damaged ({reason})") from error


def input_size(metadata: dict[str, Any]) -> tuple[int, ...]:
    """(channels, height, width) of an image for the model. Raises ValueError if the description does not tell it."""
    preprocessing = metadata.get("preprocessing")
    size = preprocessing.get("input_size") if isinstance(preprocessing, dict) else None
    if not isinstance(size, list) or len(size) != 3 or not all(type(n) is int and 0 < n <= MAX_SIDE for n in size):
        raise ValueError(f"the file's input_size is {size}, expected three numbers from 1 to {MAX_SIDE}")
    return tuple(size)


def _read_onnx(path: Path, kind: str) -> Contents:
    import onnx_ir

    model = onnx_ir.load(path)
    graphs, nodes = [model.graph, *model.graph.subgraphs()], list(model.graph.all_nodes())
    if not nodes:
        raise RefusedFile(f"{path} has no operators, expected a model")
    tensors = {name: value.const_value for graph in graphs for name, value in graph.initializers.items()}
    values = [attribute.value for node in nodes for attribute in node.attributes.values()]
    lists = [element for value in values if isinstance(value, (tuple, list)) for element in value]
    outside = [t for t in [*tensors.values(), *values, *lists] if isinstance(t, onnx_ir.ExternalTensor)]
    if outside or None in tensors.values() or model.functions:
        found = f"values in another file, {printable(str(outside[0].location))}" if outside else "functions"
        raise RefusedFile(
            f"{path} has {found}, expected one file as vilonghorn export writes it; it was not read further"
        )
    metadata = _parse(model.metadata_props)
    if (recorded := metadata.pop("digest", None)) is not None and recorded != weights_digest(model.graph):
        raise RefusedFile(f"{path} is damaged: its weights do not have the checksum that it records; export it again")
    problem = None
    for attributes in (node.attributes for node in nodes if node.domain == DOMAIN):
        needed, version = (attributes[name].value if name in attributes else "?" for name in ("interface", "version"))
        if needed != INTERFACE:
            needs = printable(f"interface {needed} of the operators, as of vilonghorn {version}")
            problem = f"it needs {needs}; this installation has interface {INTERFACE}: export it again"
    return Contents(kind, metadata, {name: t.nbytes for name, t in tensors.items()}, recorded is not None, problem)


def _read_archive(path: Path, kind: str) -> Contents:
    title = FORMATS[kind].title
    with zipfile.ZipFile(path) as archive:
        members = {member.filename: member for member in archive.infolist()}
        stored = sum(0 if m.compress_type or m.flag_bits & 1 else m.file_size for m in archive.infolist())
        if stored != sum(m.file_size for m in members.values()) or stored > path.stat().st_size:
            raise RefusedFile(f"{path} has compressed or repeated members, which torch never writes; none was read")
        if not any(name.endswith(PARTS[kind]) for name in members):
            raise RefusedFile(f"{path} is not of the format {title} (no member that ends in {PARTS[kind]})")
        if kind == "pt2" and (code := [name for name in members if name.endswith(MACHINE_CODE)]):
            raise RefusedFile(f"{path} contains machine code ({printable(code[0])}), expected none in {title}")
        if (damaged := archive.testzip()) is not None:
            raise RefusedFile(f"{path} is damaged: {printable(damaged)} does not have its checksum; export it again")
        wanted = [m for name, m in members.items() if "/extra/" in name or name.endswith(".wrapper_metadata.json")]
        texts = {m.filename: archive.read(m) for m in wanted if m.file_size <= MAX_METADATA}
    if kind == "pt2":
        entries: dict[str, Any] = {Path(name).name: text for name, text in texts.items()}
    else:
        entries = next((_parse({"all": text})["all"] for text in texts.values()), {})
    return Contents(kind, _parse(entries), {name: m.file_size for name, m in members.items()}, True)


def _parse(entries: Any) -> dict[str, Any]:
    """The values of those entries that describe the model, which are JSON."""
    names = ("model", "classes", "preprocessing", "weights", "needs", "features", "digest", "all")
    return {name: json.loads(entries[name]) for name in names if name in entries}
