"""The backends of scan and convolution: what one provides, which of them run here, and the choice between them."""

import warnings
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from .. import reference
from ..arguments import ScanArguments
from ..rules import NO_RULE, find_rule
from . import cpu as native
from . import cuda
from . import triton as triton_backend


class Backend(Protocol):
    """The names in the module of a backend. CONTRIBUTING.md says how to add one."""

    NAME: str  # for `scan(..., backend=NAME)`

    def unavailable(self, device: str | torch.device, dtype: torch.dtype = torch.float32) -> str | None:
        """Why it cannot run on that device and dtype, or None if it can."""

    def empty_states(self, args: ScanArguments, save: bool) -> Tensor:
        """Memory for the states that forward saves, in one dimension; an empty tensor without `save`."""

    def forward(self, args: ScanArguments, save: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Runs a scan of validated arguments; returns the filled `ScanArguments.new_outputs` and `empty_states`."""

    def backward(
        self, dy: Tensor, dstate: Tensor | None, args: ScanArguments, saved_states: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Gradients of the tensors of `args`, contiguous and of their dtypes; None for those absent."""


# In the order of preference: the first that can run a tensor's device type and dtype is taken.
BACKENDS: dict[str, Backend] = {module.NAME: module for module in (native, cuda, triton_backend, reference)}
CONV_BACKENDS = {native.NAME: native, cuda.NAME: cuda}  # with `conv_forward` and `conv_backward`; else torch's
_warned: set[tuple[str, torch.dtype, str]] = set()  # combinations of device type, dtype and rule


def backends(device: str | torch.device = "cpu") -> dict[str, str]:
    """The backends, and whether they can run a scan on a device.

    Args:
        device: a torch device or its type, such as "cuda".

    Returns:
        Backend name to "ready", or to the reason why it cannot run there, in order of preference.
    """
    device = torch.device(device)
    return {name: backend.unavailable(device) or "ready" for name, backend in BACKENDS.items()}


@torch.compiler.assume_constant_result
def runs_in_chunks(device: torch.device, dtype: torch.dtype, rule: str, alone: bool) -> bool:
    """Whether a scan with heads runs on Triton, in chunks of tokens. `alone`: no directions are added."""
    return rule == "longhorn_exact" and alone and triton_backend.unavailable(device, dtype) is None


def expand_heads(args: ScanArguments) -> ScanArguments:
    """Repeats dt for the channels of a head, so that any kernel can run, unless Triton runs the scan in chunks."""
    alone = args.reduce == "none" or len(args.reverse) == 1
    is_free = args.backend in (None, triton_backend.NAME)
    in_chunks = is_free and runs_in_chunks(args.x.device, args.x.dtype, args.rule, alone)
    return args if in_chunks else args.with_channel_steps()


def choose(args: ScanArguments) -> Backend:
    """The backend that runs a scan: Triton if it has heads, else the one that it names, or the first that can.

    Raises ValueError if no backend has that name, and RuntimeError if the one named cannot run this scan.
    """
    device, dtype = args.x.device, args.x.dtype
    name = triton_backend.NAME if args.has_heads else args.backend
    if name is not None:
        _require("scan", name, device, dtype, BACKENDS)
        if missing := _missing_kernel(name, args):
            raise RuntimeError(f"scan: backend {name!r} {missing}; use 'reference'")
        return BACKENDS[name]
    lines = ""
    for name, backend in BACKENDS.items():
        if (reason := backend.unavailable(device, dtype) or _missing_kernel(name, args)) is None:
            break
        lines += f"\n  {name}: {reason}"
    if name == reference.NAME and device.type != "meta" and (device.type, dtype, args.rule) not in _warned:
        _warned.add((device.type, dtype, args.rule))
        slow = f"{dtype} on {device.type!r} in plain torch, which is many times slower than a native kernel"
        warnings.warn(f"vilonghorn scans rule {args.rule!r}, {slow}. No kernel can run:{lines}", stacklevel=2)
    return backend


def has_rule(backend: str, rule: str) -> bool:
    """Whether a backend has a kernel for a rule; the reference runs every rule."""
    if rule == NO_RULE:  # a mixer without a scan
        return backend in CONV_BACKENDS
    return backend == reference.NAME or backend in find_rule("scan", rule).backends


def _missing_kernel(backend: str, args: ScanArguments) -> str | None:
    """What of a scan a backend has no kernel for, or None."""
    if not has_rule(backend, args.rule):
        return f"has no kernel for rule {args.rule!r}"
    return cuda.missing_kernel(args) if backend == cuda.NAME else None


@torch.compiler.assume_constant_result
def choose_conv(device: torch.device, dtype: torch.dtype, name: str | None) -> str:
    """The name of the backend that runs `conv_silu`: the one asked for, or the first that can. Raises as `choose`."""
    names = (*CONV_BACKENDS, reference.NAME)
    if name is None:
        return next(name for name in names if BACKENDS[name].unavailable(device, dtype) is None)
    _require("conv_silu", name, device, dtype, names)
    return name


def _require(operator: str, name: str, device: torch.device, dtype: torch.dtype, names: Iterable[str]) -> None:
    """Raises an error if no backend of `names` has that name, or it cannot run here."""
    if name not in names:
        raise ValueError(f"{operator}: no backend {name!r}; there are {', '.join(map(repr, names))}")
    if reason := BACKENDS[name].unavailable(device, dtype):
        raise RuntimeError(f"{operator}: backend {name!r} cannot run {dtype} on {device.type!r}: {reason}")
