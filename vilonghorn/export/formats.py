"""The formats of exported files: one record for each runtime. A new one is an entry of FORMATS and its functions."""

import inspect
import json
import sys
import zipfile
from collections.abc import Callable
from importlib import import_module
from io import BytesIO
from pathlib import Path, PurePosixPath
from string import Template
from typing import NamedTuple

import torch
from torch import nn
from torch.export import ExportedProgram

from ..data import image_file
from ..data.image_file import printable
from . import run_exported
from .coreml_file import check_coreml, read_coreml, write_coreml
from .native import ort_library
from .onnx_file import read_onnx, write_onnx
from .openvino_file import read_openvino, write_openvino
from .precision import PRECISIONS

SCRIPT = Path(__file__).with_name("script.py.txt")
MARK = b"# Written by vilonghorn export"  # its first words
# Of `image_file`, copied into the script.
COPIED = "FORMATS MIN_SIDE PHOTOMETRIC WHITE_IS_ZERO PNG_SCALE TURNS printable as_number to_rgb".split()
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
ORT_NEEDS = (
    "onnxruntime 1.17 or later, and libvilonghorn_cpu of this version, registered with the session before it opens the "
    "file. Where it is not, onnxruntime says: vilonghorn:Block(-1) is not a registered function/op (or Stem, or more)"
)


class Format(NamedTuple):
    """A file format, and the runtime that runs it."""

    title: str
    suffix: str  # of file names
    needs: str  # to run
    write: Callable[[ExportedProgram, Path, dict[str, str]], None]  # with the metadata of `describe`
    read: Callable[[Path], dict[str, str]]  # the metadata, without running anything
    load: Callable[..., run_exported.Runner]  # of `run_exported`: takes the path of a file, and of `library`
    packages: tuple[str, ...] = ()  # of Python, to write it
    precisions: tuple[str, ...] = ("fp32",)
    library: Callable[[], Path] | None = None  # has the blocks and scans as operators; else they are of torch
    rounding: tuple[str, ...] = ()  # precisions that round the inputs of layers, too
    files: Callable[[Path], list[Path]] = lambda path: [path]  # that make up a file of this path
    package: bool = False  # of Core ML: a folder, for one image of one size, in 8-bit pixels, that runs on macOS only
    check: Callable[[nn.Module], None] = lambda model: None  # raises ValueError for a model that cannot be written

    @property
    def runs_here(self) -> bool:
        """Whether this system has the runtime."""
        return not self.package or sys.platform == "darwin"

    def size(self, path: Path) -> str:
        """The size of a file, in words."""
        return f"{sum(file.stat().st_size for file in self.files(path)) / 1e6:.1f} MB"

    def libraries(self) -> list[Path]:
        """What a file needs beside its runtime."""
        return [self.library()] if self.library else []

    def script(self, path: Path) -> Path:
        """NAME.py beside a file NAME.SUFFIX. Raises FileExistsError if there is one that `export` did not write."""
        script = path.with_name(f"{path.name.removesuffix(self.suffix)}.py")
        if script.exists() and not (script.is_file() and script.read_bytes().startswith(MARK)):
            raise FileExistsError(f"{script}: not written by vilonghorn export: rename it, or give another --output")
        return script

    def check_installed(self) -> None:
        """Raises ImportError or FileNotFoundError if a package or the library is missing, to write and check a file."""
        try:
            for name in self.packages:
                import_module(name)
        except ModuleNotFoundError as error:
            remedy = f"run: pip install {' '.join(self.packages)}"
            raise ImportError(f"{self.title} needs {error.name}; {remedy}") from error
        self.libraries()


def write_pt2(program: ExportedProgram, path: Path, metadata: dict[str, str]) -> None:
    """Writes the graph and the weights as a file of torch.export."""
    # torch has no public way to leave guards out: those about strides would refuse a batch of one. Whole patches stay.
    program._guards_code = [guard for guard in program._guards_code if guard.endswith("== 0")]
    buffer = BytesIO()  # torch.export.save to a file hides why it cannot be written
    torch.export.save(program, buffer, extra_files=metadata)
    path.write_bytes(buffer.getvalue())


def read_pt2(path: Path) -> dict[str, str]:
    """The metadata of a file of torch.export. Nothing is unpickled."""
    with zipfile.ZipFile(path) as archive:
        entries = [PurePosixPath(name) for name in archive.namelist()]
        return {entry.name: archive.read(str(entry)).decode() for entry in entries if entry.parent.name == "extra"}


ONNX = dict(read=read_onnx, load=run_exported.load_onnx, packages=ONNX_PACKAGES, precisions=PRECISIONS)
ORT = ONNX | dict(library=ort_library, rounding=("int8",))
OPENVINO = dict(read=read_openvino, load=run_exported.load_openvino, packages=("openvino", *ONNX_PACKAGES[:2]))
OPENVINO |= dict(precisions=PRECISIONS, rounding=("int8",), files=run_exported.openvino_files)
COREML = dict(read=read_coreml, load=run_exported.load_coreml, packages=("coremltools",), precisions=("fp32", "fp16"))
COREML |= dict(rounding=("fp16",), files=lambda path: [*path.rglob("*")], package=True, check=check_coreml)
FORMATS = {
    "onnx": Format("ONNX", ".onnx", "onnxruntime, or another runtime of ONNX", write_onnx, **ONNX),
    "ort": Format("ONNX with operators of vilonghorn", ".ort.onnx", ORT_NEEDS, write_onnx, **ORT),
    "pt2": Format("torch.export", ".pt2", "torch", write_pt2, read_pt2, run_exported.load_pt2),
    "openvino": Format("OpenVINO", ".xml", "openvino, and the .bin file beside it", write_openvino, **OPENVINO),
    "coreml": Format("Core ML", ".mlpackage", "macOS 13, iOS 16 or later", write_coreml, **COREML),
}


def make_script(file: str) -> bytes:
    """The script that classifies images with a file of this name beside it. It reads them by the library's code."""
    values = {name: getattr(image_file, name) for name in COPIED}
    copied = (inspect.getsource(v) if callable(v) else f"{name} = {v!r}" for name, v in values.items())
    return Template(SCRIPT.read_text("utf-8")).substitute(file=ascii(file), copied="\n\n".join(copied)).encode()


def kind_of(path: Path) -> str | None:
    """The format of a file, by its name; None for other names."""
    kinds = [kind for kind, form in FORMATS.items() if path.name.endswith(form.suffix)]
    return max(kinds, key=lambda kind: len(FORMATS[kind].suffix), default=None)


def summarize(path: Path) -> str:
    """Says what an exported file is, in lines of text: its format and what `describe` has written into it.

    Nothing in the file is executed. Raises ValueError for a file that `export` did not write, or a damaged one.
    """
    if (kind := kind_of(path)) is None:
        suffixes = ", ".join(form.suffix for form in FORMATS.values())
        raise ValueError(f"{path} is not an exported file, expected a name that ends in one of {suffixes}")
    form = FORMATS[kind]
    try:
        about, size = {name: json.loads(value) for name, value in form.read(path).items()}, form.size(path)
        if "model" not in about:
            raise ValueError("it names no model")
    except Exception as error:  # of every kind that parsers of a damaged file raise
        reason = " ".join(str(error).split())
        raise ValueError(printable(f"{path} was not written by vilonghorn export, or is damaged: {reason}")) from error
    lines = {"format": f"{form.title}, {size}", "needs": about.pop("needs", form.needs)}
    lines |= {name: json.dumps(value, ensure_ascii=False) for name, value in about.items()}
    return "\n".join(printable(f"{name}: {value}") for name, value in lines.items())
