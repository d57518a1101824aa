"""Exports a model to a file that runs without vilonghorn.

The file takes any number of images, of any size that is a whole number of patches. It is first compared with the model
in a process that cannot import this library. If it differs, nothing is written and the exit status is 1.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import torch

from ..data.images import printable
from ..export.attention import SCANS
from ..export.contents import input_size, read_contents
from ..export.formats import FORMATS, kind_of, libraries
from ..export.load import load_for_export
from ..export.native import aoti_functions
from ..export.runtime import load
from ..export.verify import VerificationError, export
from ..export.web_page import write_page
from ..export.weights import WEIGHTS
from . import make_parser

ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")

PT2 = "vilonghorn_tiny --to pt2 --checkpoint weights.pth"
parser = make_parser("export", __doc__, "runs/photos --to onnx", PT2)
help = "directory of a run, or a model of this library, such as vilonghorn_tiny, also with a tag"
parser.add_argument("model", metavar="MODEL", nargs="?", help=help)
formats = ", ".join(f"{kind}: {form.title}" for kind, form in FORMATS.items())
help = f"format of the file (no default); {formats}; web: a folder with a page that runs the model in the browser"
parser.add_argument("--to", choices=[*FORMATS, "web"], help=help)
help = "run: best (default) or last; model: a file of a run or one that timm reads (default: the tag's, or random)"
parser.add_argument("--checkpoint", metavar="WHICH", help=help)
help = "side, or height and width, of the images, in pixels, and of a position embedding (default: the model's)"
parser.add_argument("--img-size", type=int, nargs="+", help=help)
help = "export maps instead of logits: of these blocks, or stages of a hierarchy (without INDEX: the model's default)"
parser.add_argument("--features", type=int, nargs="*", metavar="INDEX", help=help)
help = "type of the weights in the file; --to onnx, ort and web only (default: %(default)s)"
parser.add_argument("--weights", choices=WEIGHTS, default="fp32", help=help)
help = "scans of the exact rule in --to onnx: attention (onnxruntime from 1.30 on), or standard (every runtime of ONNX)"
parser.add_argument("--scan", choices=SCANS, help=f"{help} (default: attention if the model has this rule)")
help = f"file to write (default: NAME and {', '.join(form.suffix for form in FORMATS.values())}), or folder (NAME.web)"
parser.add_argument("--output", type=Path, help=help)
help = "say what an exported file contains and needs, without loading it (default: export MODEL)"
parser.add_argument("--check", type=Path, metavar="FILE", help=help)
help = "with --check: then load and run the file, which can execute what its author wrote (default: do not)"
parser.add_argument("--run", action="store_true", help=help)


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 0, or 1 if the file differs from the model or does not run."""
    options = parser.parse_args(argv)
    if options.check:
        return check(options.check, options.run)
    if not (options.model and options.to) or options.run:
        raise ValueError("expected MODEL and --to, or --check FILE, perhaps with --run")
    web, form = options.to == "web", FORMATS["onnx" if options.to == "web" else options.to]
    output = options.output or Path(Path(options.model).resolve().name + (".web" if web else form.suffix))
    if not web and (kind := kind_of(output)) != options.to:
        other = f" ({FORMATS[kind].suffix} is for --to {kind})" if kind else ""
        raise ValueError(f"--output is {output}, expected a name that ends in {form.suffix}{other}")
    if not web and output.is_dir() or not output.absolute().parent.is_dir():
        raise ValueError(f"--output is {output}, expected a file in a folder that exists")
    check_requirements("onnx" if web else options.to)
    model = load_for_export(options.model, options.checkpoint, options.img_size, options.features)
    arguments = output, options.weights, options.scan
    try:
        errors = write_page(model, *arguments) if web else export(model, options.to, *arguments)
    except VerificationError as error:
        print(f"{error}; nothing was written", file=sys.stderr)
        return 1
    for shape, error in errors:
        print(f"images {'x'.join(map(str, shape))}: differs from the model by {error:.1e}")
    if web:
        print(f"{output}: checked without vilonghorn. Serve it: python -m http.server --directory {output}")
    else:
        print(f"{output}: {form.title}, {output.stat().st_size / 1e6:.1f} MB, checked without vilonghorn")
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


def check(path: Path, run: bool = False) -> int:
    """Prints what an exported file contains and needs; with `run` also whether it runs here.

    Returns 1 if it does not run here or needs another version, else 0. Raises the errors of `read_contents`.
    """
    if FORMATS.get(kind_of(path) or "", FORMATS["pt2"]).is_onnx:
        check_requirements("onnx")
    contents = read_contents(path)
    form, about = FORMATS[contents.kind], contents.metadata
    print(f"{path}: {form.title}; needs {printable(str(about.get('needs', form.needs)))}")
    for library in libraries(contents.kind):
        print(f"the library of this installation is {library}")
    classes = f"{len(about['classes'])} names" if isinstance(about.get("classes"), list) else "no names"
    print(f"model {printable(str(about.get('model', 'unknown')))}, {classes} of classes", end=", ")
    weights, digest = printable(str(about.get("weights", "unknown"))), "right" if contents.digest else "none"
    print(f"weights {weights}, {sum(contents.members.values()) / 1e6:.1f} MB, checksums: {digest}")
    if contents.problem:
        print(contents.problem)
        return 1
    if not run:
        print("nothing was loaded; --run loads and runs the file: only for a file whose author you trust")
        return 0
    try:
        output = load(contents.kind, str(path), *libraries(contents.kind))(torch.zeros(1, *input_size(about)))
    except Exception as error:  # of every kind that torch or onnxruntime raises
        print(f"it does not run here: {error}")
        return 1
    shapes = [tuple(part.shape) for part in ([output] if isinstance(output, torch.Tensor) else output)]
    print(f"it runs here: output {', '.join(map(str, shapes))}")
    return 0
