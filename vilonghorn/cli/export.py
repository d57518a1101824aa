"""Exports a model to a file that runs without vilonghorn.

The file takes any number of images, of any size that is a whole number of patches. It is first compared with the model
in a process that cannot import this library. If it differs, nothing is written and the exit status is 1.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from jsonargparse.typing import PositiveInt
from torch import nn
from torch._inductor import cpp_builder
from torch._inductor.exc import InvalidCxxCompiler

from ..export import bench
from ..export.check import check, kind_of
from ..export.formats import FORMATS, check_weights, libraries
from ..export.model import load_for_export
from ..export.native import aoti_functions
from ..export.verify import VerificationError, export
from ..export.weights import WEIGHTS, shorten
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
help = "then time the file and the model (default: do not; without BATCH: 1)"
parser.add_argument("--bench", type=PositiveInt, nargs="*", metavar="BATCH", help=help)
help = "say what an exported file needs and whether it loads here (default: export MODEL)"
parser.add_argument("--check", type=Path, metavar="FILE", help=help)


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 0, or 1 if the file differs from the model, does not load or cannot be timed."""
    options = parser.parse_args(argv)
    if options.check:
        try:
            lines, loads = check(options.check)
        except ModuleNotFoundError as error:
            raise ImportError(f"{error}; run: pip install 'vilonghorn[export]'") from error
        print("\n".join(lines))
        return 0 if loads else 1
    model = prepare(options)
    try:
        errors = export(model, options.to, options.output, options.weights)
    except VerificationError as error:
        print(f"{error}; nothing was written", file=sys.stderr)
        return 1
    for shape, error in errors:
        print(f"images {'x'.join(map(str, shape))}: differs from the model by {error:.1e}")
    megabytes = options.output.stat().st_size / 1e6
    print(f"{options.output}: {FORMATS[options.to].title}, {megabytes:.1f} MB, checked without vilonghorn")
    if options.bench is not None:
        try:
            bench.report(model, options.to, options.output, options.bench or [1])
        except RuntimeError as error:
            print(f"{options.output} was written, but {error}", file=sys.stderr)
            return 1
    return 0


def prepare(options: argparse.Namespace) -> nn.Module:
    """Returns the model, once all that the export needs is known to be there. Sets a default for --output.

    Raises:
        ImportError, OSError, ValueError: something is missing or wrong.
    """
    if not (options.model and options.to):
        raise ValueError("expected MODEL and --to, or --check FILE")
    form = FORMATS[options.to]
    output = options.output = options.output or Path(Path(options.model).resolve().name + form.suffix)
    if kind_of(output) != options.to:
        longer = [f.suffix for f in FORMATS.values() if f is not form and f.suffix.endswith(form.suffix)]
        but = f", and not in {', '.join(longer)}" if longer else ""
        raise ValueError(f"--output is {output}, expected a name that ends in {form.suffix}{but}")
    if output.is_dir() or not output.absolute().parent.is_dir():
        raise ValueError(f"--output is {output}, expected a file in a folder that exists")
    missing = [name for name in ONNX_PACKAGES if find_spec(name) is None]
    if form.is_onnx and missing:
        raise ImportError(f"--to {options.to} needs {', '.join(missing)}; run: pip install 'vilonghorn[export]'")
    check_weights(options.to, options.weights)
    if options.to == "aoti":
        try:
            cpp_builder.get_cpp_compiler()
            aoti_functions()
        except InvalidCxxCompiler:
            raise ValueError("--to aoti needs a C++ compiler: install g++ or set CXX") from None
        except NotImplementedError as error:
            raise ValueError(str(error)) from error
    libraries(options.to)
    model = load_for_export(options.model, options.checkpoint, options.img_size, options.features)
    shorten(model, options.weights)  # fails where a weight is too large
    return model
