"""Files of `--to pt2`: torch.export."""

import zipfile
from io import BytesIO
from pathlib import Path, PurePosixPath

import torch
from torch.export import ExportedProgram


def write_pt2(program: ExportedProgram, path: Path, metadata: dict[str, str]) -> None:
    """Writes the graph and the weights."""
    # torch has no public way to leave guards out: those about strides would refuse a batch of one. Whole patches stay.
    program._guards_code = [guard for guard in program._guards_code if guard.endswith("== 0")]
    buffer = BytesIO()  # torch.export.save to a file hides why it cannot be written
    torch.export.save(program, buffer, extra_files=metadata)
    path.write_bytes(buffer.getvalue())


def read_pt2(path: Path) -> dict[str, str]:
    """The metadata of a file. Nothing is unpickled."""
    with zipfile.ZipFile(path) as archive:
        entries = [PurePosixPath(name) for name in archive.namelist()]
        return {entry.name: archive.read(str(entry)).decode() for entry in entries if entry.parent.name == "extra"}
