"""Loads and runs exported files without this library. Run as a script, it makes `import vilonghorn` fail.

    python runtime.py onnx|ort|pt2|aoti FILE [LIBRARY] < INPUTS > OUTPUTS

INPUTS and OUTPUTS are lists of tensors, saved by torch. LIBRARY has the operators that files of format "ort" need.
"""

import sys
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path

import torch
from torch import Tensor

Runner = Callable[[Tensor], Tensor | Sequence[Tensor]]  # from images (B, channels, H, W) to the model's output


def load(kind: str, path: str, library: str | None = None) -> Runner:
    """Loads a file of format "onnx", "ort", "pt2" or "aoti", to run on the CPU with torch's number of threads."""
    if kind in ("pt2", "aoti"):
        with open(path, "rb") as file:  # torch cannot open a name that the locale cannot decode
            return torch.export.load(file).module() if kind == "pt2" else torch._inductor.aoti_load_package(file)
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    if library is not None:
        options.register_custom_ops_library(library)
    session = onnxruntime.InferenceSession(Path(path).read_bytes(), options, providers=["CPUExecutionProvider"])

    def run(images: Tensor) -> Tensor | list[Tensor]:
        outputs = [torch.from_numpy(output) for output in session.run(None, {"images": images.numpy()})]
        return outputs if len(outputs) > 1 else outputs[0]

    return run


if __name__ == "__main__":
    sys.modules["vilonghorn"] = None  # any import of it raises ImportError
    outputs, sys.stdout = sys.stdout.buffer, sys.stderr  # what libraries print
    torch.set_num_threads(1)
    run = load(*sys.argv[1:])
    with torch.no_grad():
        torch.save([run(images) for images in torch.load(BytesIO(sys.stdin.buffer.read()))], outputs)
