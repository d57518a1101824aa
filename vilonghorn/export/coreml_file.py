"""Files of `--to coreml`: an ML program of Core ML for one image of one size, a folder NAME.mlpackage."""

import json
import logging
import shutil
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from ..layers import Mixer
from ..ops.rules import NO_RULE
from .attention import RULE
from .capture import input_shape

logging.getLogger("coremltools").setLevel(logging.ERROR)  # its warnings are about other converters, and the system


def check_coreml(model: nn.Module) -> None:
    """Raises ValueError for a model that needs a loop, which Core ML lacks, or that does not take images in RGB."""
    for mixer in (module for module in model.modules() if isinstance(module, Mixer)):
        in_chunks = mixer.rule == RULE and mixer.num_heads not in (None, mixer.d_inner)
        if mixer.rule != NO_RULE and not in_chunks:
            needs = f"scans of rule {RULE!r} with heads, as in vilonghornv2_*; those of this model need a loop"
            raise ValueError(f"--to coreml is for {needs}: export with --to onnx")
    names = model.pretrained_cfg.get("label_names") or ()  # type: ignore[union-attr, operator]
    if len(set(names)) < len(names) or getattr(model, "in_chans", 3) != 3:
        raise ValueError("--to coreml is for images in RGB and classes of different names: export with --to onnx")


def write_coreml(program: ExportedProgram, path: Path, metadata: dict[str, str]) -> None:
    """Writes into the folder `path` an ML program for macOS 13, iOS 16 and later, in float32 or float16.

    It takes an image of exactly its size. A classifier with names gives `classLabel` and `classLabel_probs`, others
    `output` or their maps: https://apple.github.io/coremltools/docs-guides/source/classifiers.html.
    """
    about = {name: json.loads(value) for name, value in metadata.items()}
    names, classes = [feature["name"] for feature in about.get("features", [])] or ["output"], about["classes"]
    mean, std = (torch.tensor(about["preprocessing"][name]) for name in ("mean", "std"))
    normalise, shape = nn.BatchNorm2d(3, eps=0, affine=False).eval(), tuple(input_shape(program))
    normalise.load_state_dict(dict(running_mean=mean, running_var=std.square()), strict=False)
    served = nn.Sequential(normalise, program.module(), *[nn.Softmax(-1)] * bool(classes))  # of pixels from 0 to 1
    with torch.no_grad(), redirect_stderr(StringIO()), TemporaryDirectory() as folder:  # it draws bars
        import coremltools as ct

        graph = torch.export.export(served, (torch.zeros(shape),), strict=False)
        # Core ML's own reciprocal adds 1e-4 to the divisor.
        graph = graph.run_decompositions({torch.ops.aten.reciprocal.default: lambda x: torch.ones(1) / x})
        options: dict[str, Any] = dict(minimum_deployment_target=ct.target.iOS16, skip_model_load=True)
        options["compute_precision"] = ct.precision.FLOAT16 if about["weights"] == "fp16" else ct.precision.FLOAT32
        if classes:
            options["classifier_config"] = ct.ClassifierConfig(classes)
        else:
            options["outputs"] = [*map(ct.TensorType, names)]
        model = ct.convert(graph, inputs=[ct.ImageType("images", shape, 1 / 255)], **options)
        model.user_defined_metadata.update(metadata)
        model.save(f"{folder}/model.mlpackage")
        shutil.copytree(f"{folder}/model.mlpackage", path, dirs_exist_ok=True)


def read_coreml(path: Path) -> dict[str, str]:
    """The metadata of a file."""
    import coremltools

    entries = coremltools.utils.load_spec(str(path)).description.metadata.userDefined
    return {name: value for name, value in entries.items() if not name.startswith("com.")}
