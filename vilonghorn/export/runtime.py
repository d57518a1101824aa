"""Loads and runs exported files without this library. Run as a script, it makes `import vilonghorn` fail.

    python runtime.py onnx|pt2|aoti FILE INPUTS OUTPUTS

INPUTS and OUTPUTS are lists of tensors, saved by torch.
"""

import sys
from collections.abc import Callable

import torch
from torch import Tensor

Runner = Callable[[Tensor], Tensor]  # from images (B, channels, H, W) to the model's output


def load(kind: str, path: str) -> Runner:
    """Loads a file of format "onnx", "pt2" or "aoti", to run on the CPU with torch's number of threads."""
    if kind == "pt2":
        return torch.export.load(path).module()
    if kind == "aoti":
        return torch._inductor.aoti_load_package(path)
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


if __name__ == "__main__":
    sys.modules["vilonghorn"] = None  # any import of it raises ImportError
    kind, path, inputs, outputs = sys.argv[1:]
    torch.set_num_threads(1)
    run = load(kind, path)
    with torch.no_grad():
        torch.save([run(images) for images in torch.load(inputs)], outputs)
