"""Vision Longhorn: vision backbones of bidirectional state-space blocks. The import registers the models with timm."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"  # before the imports: bindings.py compares it with the installed one

from .commands import is_program

if TYPE_CHECKING:
    from . import models
    from .tools.loaded_model import load_model as load
elif not is_program():  # the command imports torch, and with it the models, only once it needs them
    from . import models

__all__ = ["load", "models"]


def __getattr__(name: str) -> Any:
    """`load`, and in the command `models`, when they are first used."""
    if name == "load":
        return import_module(".tools.loaded_model", __name__).load_model
    if name == "models":
        return import_module(".models", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
