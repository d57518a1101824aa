"""Which code runs a scan: the backends in order of preference, what each can do here, and the choice between them."""

from __future__ import annotations

import warnings
from types import ModuleType

import torch

from . import native, reference

# A backend is a module with NAME, CHUNK, LANES, unavailable(device_type), forward and backward; the first that can
# run a device type is taken. CUDA and Triton take their places before `native` and `reference`.
BACKENDS: dict[str, ModuleType] = {module.NAME: module for module in (native, reference)}
_warned: set[str] = {"meta"}  # device types whose users know; nothing is computed on meta


def backends(device: str | torch.device = "cpu") -> dict[str, str]:
    """Says what can run a scan on a device.

    Args:
        device: a torch device or its type, such as "cuda".

    Returns:
        Backend name to "ready", or to the reason why it cannot run there, in order of preference.
    """
    device_type = torch.device(device).type
    return {name: backend.unavailable(device_type) or "ready" for name, backend in BACKENDS.items()}


def choose(device_type: str, name: str | None) -> ModuleType:
    """The backend that runs a scan on `device_type`: the one named, or the first that can.

    Raises:
        ValueError: no backend has that name.
        RuntimeError: the named backend cannot run there; the message says why.
    """
    if name is None:
        chosen = next(b for b in BACKENDS.values() if b.unavailable(device_type) is None)
        if chosen is reference and device_type not in _warned:
            _warned.add(device_type)
            reasons = "; ".join(f"{n}: {why}" for n, why in backends(device_type).items() if why != "ready")
            warnings.warn(
                f"vilonghorn scans on {device_type!r} in plain torch, which is many times slower than a native kernel "
                f"({reasons})",
                stacklevel=2,
            )
        return chosen
    if name not in BACKENDS:
        raise ValueError(f"scan: no backend {name!r}; there are {', '.join(map(repr, BACKENDS))}")
    reason = BACKENDS[name].unavailable(device_type)
    if reason is not None:
        raise RuntimeError(f"scan: backend {name!r} cannot run on {device_type!r}: {reason}")
    return BACKENDS[name]
