"""What else stands in the way of public code without CUDA and with a newer timm; each change is named in the log."""

import contextlib
import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger(__name__)

# Modules of timm under names that versions before 0.9 and 1.0 had: old name to today's.
OLD_TIMM = {
    "timm.models.layers": "timm.layers",
    "timm.models.registry": "timm.models._registry",
    "timm.models.helpers": "timm.models._helpers",
    "timm.models.features": "timm.models._features",
    "timm.models.fx_features": "timm.models._features_fx",
    "timm.models.hub": "timm.models._hub",
    "timm.models.factory": "timm.models._factory",
    **{
        f"timm.models.layers.{name}": f"timm.layers.{name}"
        for name in ("helpers", "drop", "weight_init", "mlp", "norm")
    },
}


def apply() -> list[Callable[[], Any]]:
    """Applies the patches that are needed here; returns what takes each back."""
    undo: list[Callable[[], Any]] = []
    if not torch.cuda.is_available():
        original = torch.cuda.device

        def device(target: Any) -> contextlib.AbstractContextManager:
            is_index = target is None or isinstance(target, int)
            return original(target) if is_index or torch.device(target).type == "cuda" else contextlib.nullcontext()

        torch.cuda.device = device  # type: ignore[assignment, misc]
        undo.append(lambda: setattr(torch.cuda, "device", original))
        logger.info("torch.cuda.device does nothing for a device that is not CUDA's")
    for old, new in OLD_TIMM.items():
        if _exists(old) or not _exists(new):
            continue
        sys.modules[old] = importlib.import_module(new)
        undo.append(lambda old=old: sys.modules.pop(old, None))  # type: ignore[misc]
        logger.info("%s is %s, its name today", old, new)
    return undo


def _exists(name: str) -> bool:
    try:
        return name in sys.modules or importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its package is missing
        return False
