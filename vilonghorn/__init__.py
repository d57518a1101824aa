"""Vision Longhorn: vision backbones of bidirectional state-space blocks. The import registers the models with timm."""

from . import models

__all__ = ["models"]
__version__ = "0.1.0"
