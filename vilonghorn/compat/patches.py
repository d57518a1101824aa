"""What else stands in the way of public code without CUDA and with a newer timm; the log names each change."""

import contextlib
import importlib.util
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger(__name__)
# Modules of timm, by the names that they had before versions 0.9 and 1.0.
OLD_TIMM = {f"timm.models.{n}": f"timm.models._{n}" for n in ("registry", "helpers", "features", "hub", "factory")}
OLD_TIMM |= {"timm.models.fx_features": "timm.models._features_fx", "timm.models.layers": "timm.layers"}


def apply() -> list[Callable[[], Any]]:
    """Applies what is needed here; returns functions that take it back."""
    undo: list[Callable[[], Any]] = []
    if not torch.cuda.is_available():
        original = torch.cuda.device

        def device(target: Any) -> contextlib.AbstractContextManager:
            is_other = isinstance(target, (str, torch.device)) and torch.device(target).type != "cuda"
            return contextlib.nullcontext() if is_other else original(target)

        torch.cuda.device = device
        undo.append(lambda: setattr(torch.cuda, "device", original))
        logger.info("torch.cuda.device does nothing for a device that is not CUDA's")
    for old, new in OLD_TIMM.items():
        if old not in sys.modules and importlib.util.find_spec(old) is None:
            sys.modules[old] = importlib.import_module(new)
            undo.append(lambda old=old: sys.modules.pop(old, None))
            logger.info("%s is %s, its name today", old, new)
    return undo
