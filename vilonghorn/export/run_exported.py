"""Loads and runs exported files without this library. Run as a script, it makes `import vilonghorn` fail.

    python run_exported.py load_onnx|load_pt2|load_openvino|load_coreml FILE [LIBRARY] < INPUTS > OUTPUTS

INPUTS and OUTPUTS are lists of tensors, saved by torch. LIBRARY has the operators that files of format "ort" need.
"""

import json
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

Runner = Callable[[Tensor], Tensor | Sequence[Tensor]]  # from images (B, channels, H, W) to the model's output


def load_onnx(path: str | Path, library: str | Path | None = None) -> Runner:
    """Loads a file of format "onnx" or "ort" into onnxruntime, to run on the CPU with torch's number of threads."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    if library is not None:
        options.register_custom_ops_library(str(library))
    session = onnxruntime.InferenceSession(Path(path).read_bytes(), options, providers=["CPUExecutionProvider"])

    return lambda images: _tensors(session.run(None, {"images": images.numpy()}))


def load_pt2(path: str | Path) -> Runner:
    """Loads a file of format "pt2". This unpickles parts of it: only for a file whose author you trust."""
    with open(path, "rb") as file:  # torch cannot open a name that the locale cannot decode
        return torch.export.load(file).module()


def openvino_files(path: Path) -> list[Path]:
    """A file NAME.xml, and NAME.bin beside it."""
    return [path, path.with_name(".bin".join(path.name.rsplit(".xml", 1)))]


def load_openvino(path: str | Path) -> Runner:
    """Loads a file of format "openvino", to run in float32 on the CPU with torch's number of threads."""
    import openvino

    model = openvino.Core().read_model(*(file.read_bytes() for file in openvino_files(Path(path))))
    options = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    compiled = openvino.compile_model(model, "CPU", options)

    return lambda images: _tensors(output.copy() for output in compiled(images.numpy()).values())


def load_coreml(path: str | Path) -> Runner:
    """Loads a file of format "coreml", on macOS, for one image of 8-bit pixels; classes have probabilities."""
    import coremltools
    from PIL import Image

    with TemporaryDirectory() as folder:  # Core ML reads no other suffix
        model = coremltools.models.MLModel(shutil.copytree(path, f"{folder}/model.mlpackage"))
    about = {name: json.loads(value) for name, value in model.user_defined_metadata.items() if name[:4] != "com."}
    mean, std = (torch.tensor(about["preprocessing"][name])[:, None, None] for name in ("mean", "std"))
    names, classes = [feature["name"] for feature in about.get("features", [])] or ["output"], about["classes"]

    def run(images: Tensor) -> Tensor | list[Tensor]:
        [pixels] = (255 * (images * std + mean)).round().byte().permute(0, 2, 3, 1).numpy()
        found = model.predict({"images": Image.fromarray(pixels)})
        if classes:
            return torch.tensor([[found["classLabel_probs"][name] for name in classes]])
        return _tensors(found[name] for name in names)

    return run


def _tensors(arrays: Iterable[Any]) -> Tensor | list[Tensor]:
    outputs = [torch.from_numpy(array) for array in arrays]
    return outputs if len(outputs) > 1 else outputs[0]


if __name__ == "__main__":
    sys.modules["vilonghorn"] = None  # any import of it raises ImportError
    outputs, sys.stdout = sys.stdout.buffer, sys.stderr  # what libraries print
    torch.set_num_threads(1)
    _, loader, *paths = sys.argv
    run = globals()[loader](*paths)
    with torch.no_grad():
        torch.save([run(images) for images in torch.load(BytesIO(sys.stdin.buffer.read()))], outputs)
