"""Exports models to files that run without this library: ONNX, torch.export, AOTInductor."""

from .model import load_for_export
from .verify import VerificationError, export
