"""Vision Longhorn: vision backbones of bidirectional state-space blocks. The import registers the models with timm."""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"  # before the imports: bindings.py compares it with the installed one
__all__ = ["count_flops", "load", "models", "predict", "read_image"]


def _is_command() -> bool:
    """Whether this process is `vilonghorn ...` or `python -m vilonghorn ...`."""
    program, *arguments = sys.argv or [""]
    if program != "-m":
        return Path(program).stem == "vilonghorn"
    # Python imports the package before it runs the module, whose name is then in orig_argv only, before the arguments.
    return sys.orig_argv[-1 - len(arguments)] in ("vilonghorn", "-mvilonghorn")


if TYPE_CHECKING:
    from . import models
    from .data.image_file import read_image
    from .inference import load, predict
    from .models.flops import count_flops
elif not _is_command():  # help does not wait for torch, and training sets OMP_WAIT_POLICY before torch is imported
    from . import models


_LAZY = dict(count_flops=".models.flops", load=".inference", predict=".inference", read_image=".data.image_file")


def __getattr__(name: str) -> Any:
    """Names of `_LAZY`, and in a command `models`, when they are first used."""
    if name in _LAZY:
        return getattr(import_module(_LAZY[name], __name__), name)
    if name == "models":
        return import_module(".models", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
