"""Runs exported models where this library is not: it imports none of it, and as a script it forbids it.

    python export_runtime.py onnx|pt2|aoti FILE INPUTS OUTPUTS

INPUTS and OUTPUTS are lists of tensors, as torch saves them. The loaders are also what other programs would write.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor

Runner = Callable[[Tensor], Tensor]  # images (B, channels, H, W) to what the model gives


def load_onnx(path: str) -> Runner:
    """A session of onnxruntime on the CPU, with as many threads as torch has."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


def load_pt2(path: str) -> Runner:
    """The module of a `torch.export` package, run by torch operator by operator."""
    return torch.export.load(path).module()


def load_aoti(path: str) -> Runner:
    """The machine code of an AOTInductor package."""
    return torch._inductor.aoti_load_package(path)


LOADERS: dict[str, Callable[[str], Runner]] = {"onnx": load_onnx, "pt2": load_pt2, "aoti": load_aoti}


def main(kind: str, path: str, inputs: str, outputs: str) -> None:
    """Runs the model of a file on saved images and saves what it gives."""
    torch.set_num_threads(1)
    run = LOADERS[kind](path)
    with torch.no_grad():
        torch.save([run(images) for images in torch.load(inputs)], outputs)


if __name__ == "__main__":
    sys.modules["vilonghorn"] = None  # whoever asks for it gets an ImportError
    main(*sys.argv[1:])
