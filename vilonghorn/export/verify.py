"""Exports a model to a file that appears only after its outputs were compared with the model's."""

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from timm.utils import unwrap_model
from torch import Tensor, nn

from ..data.atomic_files import atomic_folder, atomic_writes, explain_full_disk
from ..data.image_file import printable
from ..layers import Mixer
from . import run_exported
from .attention import RULE, SCANS, check_runtime
from .capture import backbone, capture, compared_shapes, describe, has_backbone
from .formats import FORMATS, make_script
from .precision import round_weights

TOLERANCE = 1e-4  # of `max_error`
ROUNDING_TOLERANCE = 0.1  # where the inputs of layers are rounded too

logger = logging.getLogger(__name__)
Errors = list[tuple[tuple[int, ...], float]]  # shape of the images and `max_error`, for each batch that was compared


class VerificationError(Exception):
    """The exported file does not run without this library, or its outputs differ from the model's."""


def export(
    model: nn.Module,
    kind: str,
    path: Path,
    precision: str = "fp32",
    scan: str | None = None,
    script: bool = False,
    fixed: bool = False,
) -> Errors:
    """Writes a model to `path`, only after `verify` has accepted the file; otherwise `path` stays as it was.

    The model is of `load_for_export`, or made by timm, also compiled or wrapped by torch: a file computes as in
    evaluation mode. `kind` is one of `FORMATS`, `precision` of the weights one of `PRECISIONS`, `scan` one of `SCANS`
    (default: the faster one that the model and the format have); the folder of `path` exists. A file with short weights
    is compared with a model that has the same ones. With `script` the script that classifies images with the file
    appears together with it. With `fixed`, and for Core ML, the file takes one image of one size.

    Raises:
        VerificationError: as `verify`.
        FileExistsError: there is a file of the script's name that `export` did not write, or the folder for Core ML.
        OSError: the file cannot be written, which is tried before the graph is captured.
        ValueError: an unknown format or precision, a weight that is not finite or too large for float16, or a
            format that lacks it; scan "attention" of a model or a format that lacks it; inside autocast; or as
            `check_coreml`.
        ImportError: scan "attention", and onnxruntime is too old for it.
    """
    if kind not in FORMATS:
        raise ValueError(f"kind is {kind!r}, expected one of {', '.join(FORMATS)}")
    form, path, model = FORMATS[kind], Path(path), unwrap_model(model)
    if precision not in form.precisions:
        raise ValueError(f"precision is {precision!r}, expected {' or '.join(form.precisions)} with {kind!r}")
    if torch.is_autocast_enabled("cpu"):
        raise ValueError("torch.autocast is on, but a file computes in float32: call export outside of its block")
    if broken := [name for name, parameter in model.named_parameters() if not parameter.isfinite().all()]:
        raise ValueError(f"{broken[0]} contains NaN or infinity, expected finite weights; export an earlier checkpoint")
    if form.library and not has_backbone(model):
        raise ValueError(f"kind is {kind!r}, which is for models of this library; export with 'onnx' or 'pt2'")
    form.check(model)
    if has_backbone(model) and not (fixed or form.package or getattr(backbone(model), "dynamic_img_size", True)):
        remedy = "make it with dynamic_img_size=True, or give fixed=True"
        raise ValueError(f"the model takes images of its own size only, but the file is for any: {remedy}")
    possible = kind == "onnx" and any(isinstance(m, Mixer) and m.rule == RULE for m in model.modules())
    scan = scan or ("attention" if possible else "standard")
    if scan not in SCANS or scan == "attention" and not possible:
        raise ValueError(f"--scan is {scan!r}, expected 'standard': 'attention' is for kind 'onnx' and rule {RULE!r}")
    if scan == "attention":
        check_runtime()
    if form.package and path.exists():
        raise FileExistsError(f"{path}: exists; remove it or give another name")
    targets, fixed = form.files(path) + [form.script(path)] * script, fixed or form.package
    model, has_operators = round_weights(model, precision), form.library is not None
    tolerance = ROUNDING_TOLERANCE if precision in form.rounding else TOLERANCE
    remedy = "export again, or elsewhere by --output"
    place = atomic_folder(path) if form.package else atomic_writes(*targets)
    with explain_full_disk(path, remedy), place as opened:
        file = opened if isinstance(opened, Path) else Path(opened[0].name)
        logger.info("capturing the graph of the model")
        program = capture(model, has_operators, "fp32" if form.package else precision, scan, fixed)
        logger.info("writing %s%s", printable(path.name), ": this takes a minute or more" * (kind == "pt2"))
        form.write(program, file, describe(model, precision, scan))
        if script:
            opened[-1].write(make_script(path.name))
        where = "a process without vilonghorn" if form.runs_here else "torch, before its conversion: no runtime here"
        logger.info("checking the file in %s", where)
        graph = None if form.runs_here else program.module()
        return verify(model, kind, file, compared_shapes(model, program), tolerance, graph)


def verify(
    model: nn.Module,
    kind: str,
    path: Path,
    shapes: Sequence[tuple[int, ...]],
    tolerance: float = TOLERANCE,
    graph: Callable[[Tensor], Any] | None = None,
) -> Errors:
    """Compares a file with the model on random images of `shapes`, in a process that cannot import this library.

    A `graph` is called in place of the file. Raises VerificationError if the file does not run, or an error is not
    below `tolerance`.
    """
    generator, form, inputs, expected = torch.Generator().manual_seed(0), FORMATS[kind], BytesIO(), model
    images = [torch.randn(shape, generator=generator) for shape in shapes]
    if form.package:
        about = {name: json.loads(value) for name, value in describe(model).items()}
        mean, std = (torch.tensor(about["preprocessing"][name])[:, None, None] for name in ("mean", "std"))
        images = [((255 * (batch * std + mean)).clamp(0, 255).round() / 255 - mean) / std for batch in images]
        if graph is None and about["classes"]:
            expected = nn.Sequential(model, nn.Softmax(-1))
    if graph is None:
        torch.save(images, inputs)
        command = [sys.executable, run_exported.__file__, form.load.__name__, path, *form.libraries()]
        process = subprocess.run(command, input=inputs.getvalue(), capture_output=True)
        if process.returncode != 0:
            error = process.stderr.decode(errors="replace").strip() or f"exit status {process.returncode}"
            raise VerificationError(f"the exported file does not run without vilonghorn: {error.splitlines()[-1]}")
        outputs = torch.load(BytesIO(process.stdout))
    else:
        outputs = [graph(batch) for batch in images]
    pairs = zip(images, outputs, strict=True)
    errors = [(tuple(batch.shape), max_error(actual, expected(batch))) for batch, actual in pairs]
    shape, worst = max(errors, key=lambda pair: pair[1])
    if worst >= tolerance:
        found = f"differs from the model by {worst:.1e} on images of shape {shape}, expected less than {tolerance:g}"
        raise VerificationError(f"the exported file {found}")
    return errors


def max_error(actual: Tensor | Sequence[Tensor], expected: Tensor | Sequence[Tensor]) -> float:
    """Returns the largest difference, divided by the largest expected value if above 1; infinite if not comparable.

    Of several outputs, the largest of theirs.
    """
    if not isinstance(expected, Tensor):
        given = [actual] if isinstance(actual, Tensor) else actual
        return max(map(max_error, given, expected)) if len(given) == len(expected) else float("inf")
    if actual.shape != expected.shape or not actual.isfinite().all():
        return float("inf")
    return ((actual - expected).abs().max() / expected.abs().max().clamp_min(1)).item()
