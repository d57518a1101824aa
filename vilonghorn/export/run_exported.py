"""Loads and runs exported files without this library. Run as a script, it makes `import vilonghorn` fail.

    python run_exported.py load_onnx|load_pt2 FILE [LIBRARY] < INPUTS > OUTPUTS

INPUTS and OUTPUTS are lists of tensors, saved by torch. LIBRARY has the operators that files of format "ort" need.
"""

import sys
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path

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

    def run(images: Tensor) -> Tensor | list[Tensor]:
        outputs = [torch.from_numpy(output) for output in session.run(None, {"images": images.numpy()})]
        return outputs if len(outputs) > 1 else outputs[0]

    return run


def load_pt2(path: str | Path) -> Runner:
    """Loads a file of format "pt2". This unpickles parts of it: only for a file whose author you trust."""
    with open(path, "rb") as file:  # torch cannot open a name that the locale cannot decode
        return torch.export.load(file).module()


if __name__ == "__main__":
    sys.modules["vilonghorn"] = None  # any import of it raises ImportError
    outputs, sys.stdout = sys.stdout.buffer, sys.stderr  # what libraries print
    torch.set_num_threads(1)
    _, loader, *paths = sys.argv
    run = {"load_onnx": load_onnx, "load_pt2": load_pt2}[loader](*paths)
    with torch.no_grad():
        torch.save([run(images) for images in torch.load(BytesIO(sys.stdin.buffer.read()))], outputs)
