"""Exports a model to a file that runs without vilonghorn.

The file takes any number of images, of any size that is a whole number of patches. It is first compared with the model
in a process that cannot import this library. If it differs, nothing is written and the exit status is 1.
"""

import sys
import zipfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from ..export.formats import FORMATS, kind_of, libraries
from ..export.model import load_for_export
from ..export.native import aoti_functions
from ..export.runtime import load
from ..export.verify import VerificationError, export
from ..export.weights import WEIGHTS
from . import make_parser

ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")

PT2 = "vilonghorn_tiny --to pt2 --checkpoint weights.pth"
parser = make_parser("export", __doc__, "runs/photos --to onnx", PT2)
help = "directory of a run, or a model of this library, such as vilonghorn_tiny, also with a tag"
parser.add_argument("model", metavar="MODEL", nargs="?", help=help)
formats = ", ".join(f"{kind}: {form.title}" for kind, form in FORMATS.items())
parser.add_argument("--to", choices=FORMATS, help=f"format of the file (no default); {formats}")
help = "run: best (default) or last; model: a file of a run or one that timm reads (default: the tag's, or random)"
parser.add_argument("--checkpoint", metavar="WHICH", help=help)
help = "side, or height and width, of the position embedding, in pixels (default: the checkpoint's or model's)"
parser.add_argument("--img-size", type=int, nargs="+", help=help)
help = "export maps instead of logits: of these blocks, or levels of a pyramid (without INDEX: the model's default)"
parser.add_argument("--features", type=int, nargs="*", metavar="INDEX", help=help)
help = "type of the weights in the file; --to onnx and ort only (default: %(default)s)"
parser.add_argument("--weights", choices=WEIGHTS, default="fp32", help=help)
help = f"file to write (default: NAME and {', '.join(form.suffix for form in FORMATS.values())})"
parser.add_argument("--output", type=Path, help=help)
help = "say what an exported file needs and whether it loads here (default: export MODEL)"
parser.add_argument("--check", type=Path, metavar="FILE", help=help)


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 0, or 1 if the file differs from the model or does not load."""
    options = parser.parse_args(argv)
    if options.check:
        return check(options.check)
    if not (options.model and options.to):
        raise ValueError("expected MODEL and --to, or --check FILE")
    form = FORMATS[options.to]
    output = options.output or Path(Path(options.model).resolve().name + form.suffix)
    if (kind := kind_of(output)) != options.to:
        other = f" ({FORMATS[kind].suffix} is for --to {kind})" if kind else ""
        raise ValueError(f"--output is {output}, expected a name that ends in {form.suffix}{other}")
    if output.is_dir() or not output.absolute().parent.is_dir():
        raise ValueError(f"--output is {output}, expected a file in a folder that exists")
    check_requirements(options.to)
    model = load_for_export(options.model, options.checkpoint, options.img_size, options.features)
    try:
        errors = export(model, options.to, output, options.weights)
    except VerificationError as error:
        print(f"{error}; nothing was written", file=sys.stderr)
        return 1
    for shape, error in errors:
        print(f"images {'x'.join(map(str, shape))}: differs from the model by {error:.1e}")
    megabytes = output.stat().st_size / 1e6
    print(f"{output}: {form.title}, {megabytes:.1f} MB, checked without vilonghorn")
    return 0


def check_requirements(kind: str) -> None:
    """Raises ImportError, OSError or ValueError if something that a format needs is missing."""
    try:
        for name in ONNX_PACKAGES if FORMATS[kind].is_onnx else ():
            import_module(name)
    except ModuleNotFoundError as error:
        raise ImportError(f"--to {kind} needs {error.name}; run: pip install {' '.join(ONNX_PACKAGES)}") from error
    libraries(kind)
    if kind == "aoti":
        aoti_functions()


def check(path: Path) -> int:
    """Prints what an exported file needs, and whether it loads here; returns 0 if it does, else 1.

    Raises:
        ValueError: a name that no format has, or a file that is not of the format that its name says.
        FileNotFoundError: there is no such file.
    """
    kind = kind_of(path)
    if kind is None:
        suffixes = ", ".join(form.suffix for form in FORMATS.values())
        raise ValueError(f"--check is {path}, expected a name that ends in one of {suffixes}")
    if not path.is_file():
        raise FileNotFoundError(f"--check is {path}, but there is no such file")
    form = FORMATS[kind]
    if not (form.is_onnx or zipfile.is_zipfile(path)):  # torch would print a traceback
        raise ValueError(f"{path} is not of the format {form.title} (not a ZIP archive)")
    print(f"{path}: {form.title}; needs {form.needs}")
    for library in libraries(kind):
        print(f"the library of this installation is {library}")
    try:
        load(kind, str(path), *libraries(kind))
    except Exception as error:  # of every kind that torch or onnxruntime raises
        print(f"it does not load here: {error}")
        return 1
    print("it loads here")
    return 0
