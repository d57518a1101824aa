"""Vision Longhorn: vision backbones of bidirectional state-space blocks. The import registers the models with timm."""

__version__ = "0.1.0"  # before the imports: bindings.py compares it with the installed one

from . import models

__all__ = ["models"]
