"""Which code runs a scan: the backends in order of preference, what each can do here, and the choice between them."""

from __future__ import annotations

import warnings
from types import ModuleType

import torch
from torch import Tensor

from .. import reference
from . import cpu as native
from . import cuda
from . import triton as triton_backend

# A backend is a module with NAME, CHUNK, LANES, unavailable(device_type, dtype), forward and backward; the first that
# can run a tensor's device type and dtype is taken.
BACKENDS: dict[str, ModuleType] = {module.NAME: module for module in (native, cuda, triton_backend, reference)}
_warned: set[tuple[str, torch.dtype]] = set()  # whose users know


def backends(device: str | torch.device = "cpu") -> dict[str, str]:
    """Says what can run a scan on a device.

    Args:
        device: a torch device or its type, such as "cuda".

    Returns:
        Backend name to "ready", or to the reason why it cannot run there, in order of preference.
    """
    device_type = torch.device(device).type
    return {name: backend.unavailable(device_type) or "ready" for name, backend in BACKENDS.items()}


def choose(x: Tensor, name: str | None) -> ModuleType:
    """The backend that runs a scan of x's device and dtype: the one named, or the first that can.

    Raises:
        ValueError: no backend has that name.
        RuntimeError: the named backend cannot run there; the message says why.
    """
    device_type = x.device.type
    if name is None:
        chosen = next(b for b in BACKENDS.values() if b.unavailable(device_type, x.dtype) is None)
        if chosen is reference and device_type != "meta" and (device_type, x.dtype) not in _warned:
            _warned.add((device_type, x.dtype))
            reasons = "; ".join(
                f"{n}: {b.unavailable(device_type, x.dtype)}" for n, b in BACKENDS.items() if b is not chosen
            )
            warnings.warn(
                f"vilonghorn scans {x.dtype} on {device_type!r} in plain torch, which is many times slower than a native "
                f"kernel ({reasons})",
                stacklevel=2,
            )
        return chosen
    if name not in BACKENDS:
        raise ValueError(f"scan: no backend {name!r}; there are {', '.join(map(repr, BACKENDS))}")
    reason = BACKENDS[name].unavailable(device_type, x.dtype)
    if reason is not None:
        raise RuntimeError(f"scan: backend {name!r} cannot run {x.dtype} on {device_type!r}: {reason}")
    return BACKENDS[name]
