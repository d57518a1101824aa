"""Gradients of parameters, of which the CPU kernels leave one for each sequence (or for each part of a norm's rows): room for
these addends, and for their sums by `vl_sum`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .abi import Call, Sum, Sums

GRAIN = 16384  # numbers that a thread should have for its share


class Addends(NamedTuple):
    """What a kernel leaves of one parameter's gradient."""

    name: str  # of the field that tells the kernel where
    struct: ctypes.Structure  # that has this field
    parameter: Tensor | None


class ParameterGradients:
    """Tells a kernel where to leave its addends; `sums` is then for `vl_sum`, which makes the gradients of them.

    Args:
        call: of the kernel.
        count: addends of each gradient.
        addends: of all parameters of the call, absent ones included.
    """

    def __init__(self, call: Call, count: int, addends: Sequence[Addends]):
        self._addends, present = addends, [a for a in addends if a.parameter is not None]
        total = sum(a.parameter.numel() for a in present)
        at = call.pointer(torch.empty(count * total, dtype=call.real, device=call.device))
        self._sums = [torch.empty(a.parameter.shape, dtype=call.real, device=call.device) for a in present]
        structs = (Sum * len(present))()
        for struct, a, grad in zip(structs, present, self._sums):
            setattr(a.struct, a.name, at)
            struct.addends, struct.sum, struct.size = at, grad.data_ptr(), grad.numel()
            at += count * grad.numel() * call.real.itemsize
        threads = max(1, min(torch.get_num_threads(), count * total // GRAIN))
        self.sums = Sums(structs, len(present), count, threads, call.real == torch.float64, threads)

    def gradients(self) -> list[Tensor | None]:
        """In the order of the addends; None for absent parameters."""
        sums = iter(self._sums)
        return [None if a.parameter is None else next(sums).to(a.parameter.dtype) for a in self._addends]
