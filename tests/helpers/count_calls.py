"""Counts what a forward pass on the CPU enters of this package: files, functions, and calls of them.

python tests/helpers/count_calls.py vilonghornv2_tiny vilonghorn_tiny
"""

import sys
from pathlib import Path

import timm
import torch

import vilonghorn

PACKAGE = str(Path(vilonghorn.__file__).parent)


def count(model: torch.nn.Module, images: torch.Tensor) -> dict[str, int]:
    """Files and functions of this package, and calls of them, in the second of two forward passes."""
    codes = []

    def note(frame, event, _):
        if event == "call":
            codes.append(frame.f_code)

    with torch.no_grad():
        model(images)
        sys.setprofile(note)
        try:
            model(images)
        finally:
            sys.setprofile(None)
    ours = [code for code in codes if code.co_filename.startswith(PACKAGE)]
    return {"files": len({code.co_filename for code in ours}), "functions": len(set(ours)), "calls": len(ours)}


if __name__ == "__main__":
    for name in sys.argv[1:] or ["vilonghornv2_tiny", "vilonghorn_tiny"]:
        model = timm.create_model(name).eval()
        found = count(model, torch.randn(1, 3, 224, 224))
        print(name, ", ".join(f"{number} {kind}" for kind, number in found.items()))
