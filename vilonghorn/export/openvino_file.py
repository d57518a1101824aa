"""Files of `--to openvino`: the intermediate representation of OpenVINO, NAME.xml and NAME.bin."""

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

from torch.export import ExportedProgram

from .onnx_file import write_onnx
from .run_exported import openvino_files

SECTION = "vilonghorn"  # of the file's runtime information, with the metadata of `describe`
RESIZE_TYPES = {"center": "crop", "squash": "standard", "border": "fit_to_window_letterbox"}
INTERPOLATIONS = {"bilinear": "LINEAR", "bicubic": "CUBIC", "nearest": "NEAREST"}


def write_openvino(program: ExportedProgram, path: Path, metadata: dict[str, str]) -> None:
    """Writes the ONNX graph as NAME.xml, which is `path`, and NAME.bin."""
    import openvino

    with TemporaryDirectory() as folder:
        file = Path(folder, "model.xml")
        write_onnx(program, file, metadata)
        model = openvino.Core().read_model(file.read_bytes())
        for section, values in ((SECTION, metadata), ("model_info", model_info(metadata))):
            for name, value in values.items():
                model.set_rt_info(value, [section, name])
        openvino.save_model(model, file, compress_to_fp16=False)  # the weights have their type already
        for source, target in zip(openvino_files(file), openvino_files(path)):
            shutil.copyfile(source, target)


def model_info(metadata: dict[str, str]) -> dict[str, str]:
    """How OpenVINO's Model API resizes and normalises images in RGB, and names classes.

    https://github.com/open-edge-platform/model_api/blob/master/docs/model-configuration.md has the names and values. A
    space separates the names of classes, so that one within a name becomes "_". There is no crop_pct.
    """
    cfg, classes = (json.loads(metadata[name]) for name in ("preprocessing", "classes"))
    mean, std = (" ".join(f"{round(255 * value, 4)}" for value in cfg[name]) for name in ("mean", "std"))
    found = dict(model_type="Classification", mean_values=mean, scale_values=std, reverse_input_channels="False")
    found |= dict(resize_type=RESIZE_TYPES[cfg["crop_mode"]], pad_value=f"{255 * cfg['mean'][0]:.0f}")
    if cfg["interpolation"] in INTERPOLATIONS:
        found["interpolation_mode"] = INTERPOLATIONS[cfg["interpolation"]]
    return found | (dict(labels=" ".join("_".join(name.split()) for name in classes)) if classes else {})


def read_openvino(path: Path) -> dict[str, str]:
    """The metadata of a file."""
    section = ElementTree.parse(path).find(f"rt_info/{SECTION}")
    return {} if section is None else {entry.tag: entry.attrib["value"] for entry in section}
