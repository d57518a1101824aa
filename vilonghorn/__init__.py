"""Vision Longhorn: vision backbones of bidirectional state-space blocks. The import registers the models with timm."""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"  # before the imports: bindings.py compares it with the installed one
__all__ = ["count_flops", "load", "models", "predict", "read_image"]


def _is_command() -> bool:
    """Whether this process is `vilonghorn ...` or `python -m vilonghorn ...`."""
    if sys.argv[:1] == ["-m"]:  # Python imports the package of the module that it is to run
        return sys.orig_argv[-len(sys.argv)] in ("vilonghorn", "-mvilonghorn")
    return Path(*sys.argv[:1]).stem == "vilonghorn"


if TYPE_CHECKING:
    from . import models
    from .data.images import read_image
    from .inference import load, predict
    from .models.flops import count_flops
elif not _is_command():  # a command imports torch, and with it the models, only if it needs them
    from . import models


_LAZY = {"count_flops": ".models.flops", "load": ".inference", "predict": ".inference", "read_image": ".data.images"}


def __getattr__(name: str) -> Any:
    """Names of `_LAZY`, and in a command `models`, when they are first used."""
    if name in _LAZY:
        return getattr(import_module(_LAZY[name], __name__), name)
    if name == "models":
        return import_module(".models", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
