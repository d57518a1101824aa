"""Exports a model to a file that runs without vilonghorn, or says what an exported file is.

The file takes any number of images, of any size that is a whole number of patches. It is first compared with the model
in a process that cannot import this library; one for Core ML on macOS only. If it differs, nothing is written and the
exit status is 1. The script NAME.py beside it classifies images. Without --to, MODEL is an exported file, of which
nothing is executed.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from ..engine.distributed import shell_path
from ..export.attention import SCANS
from ..export.capture import has_backbone
from ..export.formats import FORMATS, kind_of, summarize
from ..export.load import load_for_export
from ..export.precision import PRECISIONS
from ..export.verify import VerificationError, export
from ..export.web_page import read_examples, write_page
from . import make_parser

PT2 = "vilonghorn_tiny --to pt2 --checkpoint weights.pth"
parser = make_parser("export", __doc__, "runs/photos --to onnx", PT2, "photos.onnx")
help = "directory of a run, or a model of this library, such as vilonghorn_tiny, also with a tag; or an exported file"
parser.add_argument("model", metavar="MODEL", help=help)
formats = ", ".join(f"{kind}: {form.title}" for kind, form in FORMATS.items())
help = f"format of the file (no default); {formats}; web: a folder with a page that runs the model in the browser"
parser.add_argument("--to", choices=[*FORMATS, "web"], help=help)
help = "run: best (default) or last; model: a file of a run or one that timm reads (default: the tag's, or random)"
parser.add_argument("--checkpoint", metavar="WHICH", help=help)
help = "side, or height and width, of the images, in pixels, and of a position embedding (default: the model's)"
parser.add_argument("--img-size", type=int, nargs="+", help=help)
help = "export maps instead of logits: of these blocks, or stages of a hierarchy (without INDEX: the model's default)"
parser.add_argument("--features", type=int, nargs="*", metavar="INDEX", help=help)
help = "type of the weights (pt2: fp32, coreml: fp32, fp16); --weights is the old name (default: %(default)s)"
parser.add_argument("--precision", "--weights", choices=PRECISIONS, default="fp32", help=help)
help = "scans of the exact rule in --to onnx: attention (onnxruntime from 1.30 on), or standard (every runtime of ONNX)"
parser.add_argument("--scan", choices=SCANS, help=f"{help} (default: attention if the model has this rule)")
help = "the file takes one image of the size of --img-size; vilonghornv2_* have no loop then (--to coreml: always)"
parser.add_argument("--fixed-size", action="store_true", help=help)
help = f"file to write (default: NAME and {', '.join(form.suffix for form in FORMATS.values())}), or folder (NAME.web)"
parser.add_argument("--output", type=Path, help=help)
help = "pictures on the page of --to web, which opens with the first (default: three held-out images of a run)"
parser.add_argument("--examples", type=Path, nargs="+", metavar="FILE", help=help)


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 0, or 1 if the file differs from the model or does not run."""
    options = parser.parse_args(argv)
    if not options.to:
        file = Path(options.model)
        if not (file.is_file() or file.is_dir() and kind_of(file)):
            raise ValueError(f"--to is missing, and there is no exported file {options.model}")
        print(summarize(file))
        return 0
    web, form = options.to == "web", FORMATS["onnx" if options.to == "web" else options.to]
    output = options.output or Path(Path(options.model).resolve().name + (".web" if web else form.suffix))
    if not web and (kind := kind_of(output)) != options.to:
        other = f" ({FORMATS[kind].suffix} is for --to {kind})" if kind else ""
        raise ValueError(f"--output is {output}, expected a name that ends in {form.suffix}{other}")
    if not (web or form.package) and output.is_dir() or not output.absolute().parent.is_dir():
        raise ValueError(f"--output is {output}, expected a file in a folder that exists")
    if options.examples and not web:
        raise ValueError("--examples is for --to web: leave it out")
    form.check_installed()
    examples = read_examples(options.model, options.examples) if web else []
    model = load_for_export(options.model, options.checkpoint, options.img_size, options.features)
    if web and not has_backbone(model):
        raise ValueError(f"--to web is for models of this library, not {options.model}; export with --to onnx")
    script = options.features is None and model.num_classes > 0 and getattr(model, "in_chans", 3) == 3
    script = script and not (web or form.package)
    arguments = dict(precision=options.precision, scan=options.scan, fixed=options.fixed_size)
    try:
        if web:
            errors = write_page(model, output, examples, **arguments)
        else:
            errors = export(model, options.to, output, script=script, **arguments)
    except VerificationError as error:
        print(f"{error}; nothing was written", file=sys.stderr)
        return 1
    for shape, error in errors:
        print(f"images {'x'.join(map(str, shape))}: differs from the model by {error:.1e}")
    if web:
        print(f"{output}: checked without vilonghorn. Serve it: python -m http.server --directory {shell_path(output)}")
    else:
        checked = "checked without vilonghorn" if form.runs_here else "not run: its runtime is for macOS and iOS only"
        print(f"{output}: {form.title}, {form.size(output)}, {checked}")
    if script:
        print(f"classify images with it: python {shell_path(form.script(output))} IMAGE...")
    return 0
