"""Exports models to files that run without this package: ONNX, onnxruntime with native operators, torch.export,
a page for a browser.
"""

from .load import load_for_export
from .native import ort_library
from .verify import VerificationError, export
