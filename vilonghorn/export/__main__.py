"""Exports a model for other runtimes: `vilonghorn export RUN --to onnx|ort|pt2|aoti`.

The file takes any number of images, of any size that is a whole number of patches. It is first compared with the model
in a process that cannot import this library. If it differs, nothing is written and the exit status is 1.
"""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from jsonargparse.typing import PositiveInt
from torch import nn
from torch._inductor import cpp_builder
from torch._inductor.exc import InvalidCxxCompiler

from ..commands import make_parser
from . import bench
from .check import check, kind_of
from .formats import FORMATS, OPSET, OPSETS, check_opset, check_weights, libraries
from .model import load_for_export
from .native import aoti_functions
from .verify import VerificationError, export
from .weights import WEIGHTS, shorten

ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command, also of its completion."""
    about = "Export a model to a file that runs without vilonghorn. " + __doc__.split("\n\n")[1]
    parser = make_parser("export", about, "runs/photos --to onnx", "vilonghorn_tiny --to pt2 --checkpoint weights.pth")
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
    help = "opset of ONNX: 18, or 27, whose LinearAttention computes vilonghornv2_* (default: %(default)s)"
    parser.add_argument("--opset", type=int, choices=OPSETS, default=OPSET, help=help)
    help = f"file to write (default: NAME and {', '.join(form.suffix for form in FORMATS.values())})"
    parser.add_argument("--output", type=Path, help=help)
    help = "then time the file and the model (default: do not; without BATCH: 1)"
    parser.add_argument("--bench", type=PositiveInt, nargs="*", metavar="BATCH", help=help)
    help = "say what an exported file needs and whether it loads here (default: export MODEL)"
    parser.add_argument("--check", type=Path, metavar="FILE", help=help)
    return parser


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, nn.Module | None]:
    """Returns the options and the model, None with --check.

    Ends the program with status 2 and a sentence if something is wrong.
    """
    parser = build_parser()
    options = parser.parse_args(argv)
    if options.check:
        return options, None
    if not (options.model and options.to):
        parser.error("expected MODEL and --to, or --check FILE")
    form = FORMATS[options.to]
    output = options.output = options.output or Path(Path(options.model).resolve().name + form.suffix)
    if kind_of(output) != options.to:
        longer = [f.suffix for f in FORMATS.values() if f is not form and f.suffix.endswith(form.suffix)]
        but = f", and not in {', '.join(longer)}" if longer else ""
        parser.error(f"--output is {output}, expected a name that ends in {form.suffix}{but}")
    if output.is_dir() or not output.absolute().parent.is_dir():
        parser.error(f"--output is {output}, expected a file in a folder that exists")
    missing = [name for name in ONNX_PACKAGES if importlib.util.find_spec(name) is None]
    if form.is_onnx and missing:
        parser.error(
            f"--to {options.to} needs {', '.join(missing)}, not installed here: pip install 'vilonghorn[export]'"
        )
    try:
        check_weights(options.to, options.weights)
        if options.to == "aoti":
            cpp_builder.get_cpp_compiler()
            aoti_functions()
        libraries(options.to)
        model = load_for_export(options.model, options.checkpoint, options.img_size, options.features)
        check_opset(model, options.to, options.opset)
        shorten(model, options.weights)  # fails where a weight is too large
        return options, model
    except InvalidCxxCompiler:
        parser.error("--to aoti needs a C++ compiler: install g++, or name one in the environment variable CXX")
    except (ValueError, OSError, NotImplementedError) as error:
        parser.error(str(error))


def report_check(path: Path) -> int:
    """Prints what a file needs; returns the exit status: 0 if it loads here."""
    try:
        lines, loads = check(path)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(f"{error}: pip install 'vilonghorn[export]'", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0 if loads else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    options, model = parse(argv)
    if model is None:
        return report_check(options.check)
    try:
        errors = export(model, options.to, options.output, options.weights, options.opset)
    except VerificationError as error:
        print(f"{error}; nothing was written", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{options.output} cannot be written ({error}); nothing was written", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
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


if __name__ == "__main__":
    sys.exit(main())
