"""Exports a model for other runtimes: `vilonghorn export RUN --to onnx|pt2|aoti`.

The file takes any number of images, of any size that is a whole number of patches. It is first compared with the model
in a process that cannot import this library. If it differs, nothing is written and the exit status is 1.
"""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from jsonargparse.typing import PositiveInt
from torch._inductor import cpp_builder
from torch._inductor.exc import InvalidCxxCompiler

from ..commands import make_parser
from ..models import VisionSSM
from . import bench
from .formats import FORMATS
from .model import load_for_export
from .verify import VerificationError, export

ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command, also of its completion."""
    about = "Export a model to a file that runs without vilonghorn. " + __doc__.split("\n\n")[1]
    parser = make_parser("export", about, "runs/photos --to onnx", "vilonghorn_tiny --to pt2 --checkpoint weights.pth")
    help = "directory of a run, or a model of this library, such as vilonghorn_tiny"
    parser.add_argument("model", metavar="MODEL", help=help)
    formats = ", ".join(f"{kind}: {form.title}" for kind, form in FORMATS.items())
    parser.add_argument("--to", required=True, choices=FORMATS, help=formats)
    help = "run: best (default) or last; model: a file of a run or one that timm reads (default: random weights)"
    parser.add_argument("--checkpoint", metavar="WHICH", help=help)
    help = "side, or height and width, of the position embedding, in pixels (default: the checkpoint's or model's)"
    parser.add_argument("--img-size", type=int, nargs="+", help=help)
    parser.add_argument("--output", type=Path, help="file to write (default: NAME.onnx, NAME.pt2 or NAME.aoti.pt2)")
    help = "then time the file and the model (default: do not; without BATCH: 1)"
    parser.add_argument("--bench", type=PositiveInt, nargs="*", metavar="BATCH", help=help)
    return parser


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, VisionSSM]:
    """Returns the options and the model; ends the program with status 2 and a sentence if something is wrong."""
    parser = build_parser()
    options = parser.parse_args(argv)
    default = Path(Path(options.model).resolve().name + FORMATS[options.to].suffix)
    output = options.output = options.output or default
    if output.suffix != default.suffix:
        parser.error(f"--output is {output}, expected a name that ends in {default.suffix}")
    if output.is_dir() or not output.absolute().parent.is_dir():
        parser.error(f"--output is {output}, expected a file in a folder that exists")
    missing = [name for name in ONNX_PACKAGES if importlib.util.find_spec(name) is None]
    if options.to == "onnx" and missing:
        parser.error(f"--to onnx needs {', '.join(missing)}, not installed here: pip install 'vilonghorn[export]'")
    try:
        if options.to == "aoti":
            cpp_builder.get_cpp_compiler()
        return options, load_for_export(options.model, options.checkpoint, options.img_size)
    except InvalidCxxCompiler:
        parser.error("--to aoti needs a C++ compiler: install g++, or name one in the environment variable CXX")
    except (ValueError, OSError) as error:
        parser.error(str(error))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    options, model = parse(argv)
    try:
        errors = export(model, options.to, options.output)
    except VerificationError as error:
        print(f"{error}; nothing was written", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    for shape, error in errors:
        print(f"images {'x'.join(map(str, shape))}: differs from the model by {error:.1e}")
    megabytes = options.output.stat().st_size / 1e6
    print(f"{options.output}: {FORMATS[options.to].title}, {megabytes:.1f} MB, checked without vilonghorn")
    if options.bench is not None:
        bench.report(model, options.to, options.output, options.bench or [1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
