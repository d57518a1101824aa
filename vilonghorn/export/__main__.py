"""Exports a model for other runtimes: `python -m vilonghorn.export MODEL --to onnx|pt2|aoti`.

The file takes any number of images of any whole number of patches. It is compared with the model, in a process that
cannot import this library, before it takes the place that was asked for: one that differs is thrown away, and the exit
status is 1. This file is the command; the formats have theirs beside it.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch._inductor import cpp_builder
from torch._inductor.exc import InvalidCxxCompiler

from vilonghorn.data.files import sync_folder
from vilonghorn.models import VisionSSM

from . import bench as export_bench
from . import runtime as export_runtime
from .formats import OPSET, SMALLEST_GRID, SUFFIXES, WRITERS, capture, image_sizes
from .model import build

TOLERANCE = 1e-4  # of the largest difference, in units of the largest output where that is above 1
BATCHES = (1, 2, 5)  # images, in each size that is compared
EXTRA = ("onnx", "onnxscript", "onnxruntime")


class WrongExport(Exception):
    """The file does not compute what the model computes."""


def export(model: VisionSSM, kind: str, path: Path) -> list[tuple[tuple[int, ...], float]]:
    """Writes a model in a format and compares the file with it; `path` is then whole, or as it was.

    Args:
        model: as `capture` takes it.
        kind: "onnx", "pt2" or "aoti".
        path: the file, in a folder that exists.

    Returns:
        The shapes of the images that were compared and the error at each (see TOLERANCE).

    Raises:
        WrongExport: the file does not run elsewhere, or gives something else than the model.
    """
    with _place_beside(path) as folder:
        written = folder / f"model{SUFFIXES[kind]}"
        WRITERS[kind](capture(model), written)
        errors = compare(model, kind, written, folder)
        _replace(written, path)
    return errors


def compare(model: VisionSSM, kind: str, path: Path, folder: Path) -> list[tuple[tuple[int, ...], float]]:
    """Runs a file in a process without this library, at two sizes and three batch sizes, and holds it to the model.

    Args:
        model: the truth.
        kind: format of the file.
        path: the file.
        folder: for what the two processes tell each other.

    Returns, raises: as `export`.
    """
    inputs, outputs = folder / "inputs", folder / "outputs"
    images = list(sample_images(model))
    torch.save(images, inputs)
    script = [sys.executable, export_runtime.__file__, kind, str(path), str(inputs), str(outputs)]
    ended = subprocess.run(script, capture_output=True, text=True)
    if ended.returncode != 0:
        last = (ended.stderr.strip() or f"exit status {ended.returncode}").splitlines()[-1]
        raise WrongExport(f"the exported file does not run without vilonghorn: {last}")
    errors = []
    for batch, actual in zip(images, torch.load(outputs), strict=True):
        with torch.no_grad():
            errors.append((tuple(batch.shape), difference(actual, model(batch))))
    shape, worst = max(errors, key=lambda pair: pair[1])
    if worst >= TOLERANCE:
        raise WrongExport(
            f"the exported file differs from the model by {worst:.1e} on images of shape {shape}, expected less than {TOLERANCE:g}"
        )
    return errors


def sample_images(model: VisionSSM) -> Iterator[Tensor]:
    """Random images in the model's own size and in a wider one, in batches of every size of BATCHES."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = model.patch_embed.grid_size
    for grid in ((rows, columns), (max(SMALLEST_GRID, 3 * rows // 4), columns + 3)):
        for batch in BATCHES:
            yield torch.randn(batch, model.in_chans, *image_sizes(model, *grid), generator=generator)


def difference(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, in units of the largest expected value where that is above 1; infinite if shapes differ."""
    if actual.shape != expected.shape or not actual.isfinite().all():
        return float("inf")
    return ((actual - expected).abs().max() / expected.abs().max().clamp_min(1)).item()


@contextmanager
def _place_beside(path: Path) -> Iterator[Path]:
    """A folder on the disk of `path`, which is gone when the block ends, however it ends."""
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        yield Path(folder)


def _replace(written: Path, path: Path) -> None:
    with open(written, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(written, path)
    sync_folder(path.parent)


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, VisionSSM]:
    """The options and the model, or an end with exit status 2 and a sentence."""
    parser = argparse.ArgumentParser(prog="python -m vilonghorn.export", description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a name of this library's, such as vilonghorn_tiny")
    parser.add_argument(
        "--to", required=True, choices=tuple(WRITERS), help=f"ONNX (opset {OPSET}), torch.export or AOTInductor"
    )
    parser.add_argument(
        "--checkpoint", type=Path, help="weights, as a run leaves them or as timm reads them (default: random)"
    )
    parser.add_argument(
        "--img-size", type=int, nargs="+", help="side, or height and width, that positions are kept for"
    )
    parser.add_argument("--output", type=Path, help="the file (default: MODEL.onnx, MODEL.pt2 or MODEL.aoti.pt2)")
    parser.add_argument(
        "--bench", type=int, nargs="*", metavar="BATCH", help="then time the file beside the model (default: batch 1)"
    )
    options = parser.parse_args(argv)

    suffix = SUFFIXES[options.to]
    default = f"{options.model}{'.aoti' if options.to == 'aoti' else ''}{suffix}"
    options.output = Path(default) if options.output is None else options.output
    if options.output.suffix != suffix:
        parser.error(f"--output {options.output}: expected a name that ends in {suffix}")
    if options.output.is_dir() or not options.output.absolute().parent.is_dir():
        parser.error(f"--output {options.output}: expected a file in a folder that exists")
    if any(batch < 1 for batch in options.bench or ()):
        parser.error("--bench: batches are of at least 1 image")
    missing = [name for name in EXTRA if importlib.util.find_spec(name) is None] if options.to == "onnx" else []
    if missing:
        parser.error(f"--to onnx needs {', '.join(missing)}, not installed here: pip install 'vilonghorn[export]'")
    if options.to == "aoti":
        try:
            cpp_builder.get_cpp_compiler()
        except InvalidCxxCompiler:
            parser.error("--to aoti needs a C++ compiler: install g++, or name one in the environment variable CXX")
    try:
        return options, build(options.model, options.checkpoint, options.img_size)
    except (ValueError, OSError) as error:
        parser.error(str(error))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    options, model = parse(argv)
    try:
        errors = export(model, options.to, options.output)
    except WrongExport as error:
        print(f"{error}; nothing was written", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    for shape, error in errors:
        print(f"images {'x'.join(map(str, shape))}: differs from the model by {error:.1e}")
    form = (
        f"ONNX, opset {OPSET}" if options.to == "onnx" else {"pt2": "torch.export", "aoti": "AOTInductor"}[options.to]
    )
    print(f"{options.output}: {form}, {options.output.stat().st_size / 1e6:.1f} MB, checked without vilonghorn")
    if options.bench is not None:
        export_bench.report(model, options.to, options.output, options.bench or [1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
