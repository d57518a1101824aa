"""Counts of the scan and what is fused with it for fvcore and thop, which count only operators that they know.

Both count multiply-adds: half of what `torch.utils.flop_counter` counts by `vilonghorn.ops.flops`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..layers import Mixer
from ..ops.flops import mamba_inner_flops
from ..ops.validate import MambaInnerArguments


def fvcore_handles() -> dict[str, Callable]:
    """Counts for fvcore: `FlopCountAnalysis(model, images).set_op_handle(**fvcore_handles())`."""
    return {"vilonghorn::mamba_inner": _count_mamba_inner}


def thop_ops() -> dict[type, Callable]:
    """Counts for thop: `thop.profile(model, (images,), custom_ops=thop_ops())`."""
    return {Mixer: _count_mixer}


def _count_mamba_inner(inputs: Sequence[Any], outputs: Sequence[Any]) -> float:
    """Multiply-adds of a traced `vilonghorn::mamba_inner`, from its values in the graph."""
    *shapes, scan_norm, rule, reverse, _, _ = (
        value.type().sizes() if isinstance(value.type(), torch.TensorType) else value.toIValue() for value in inputs
    )
    return mamba_inner_flops(MambaInnerArguments(*shapes, rule, reverse), scan_norm) / 2


def _count_mixer(mixer: Mixer, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    """Adds the multiply-adds of a mixer, its projections included, to its `total_ops`, as thop wants it."""
    B, L, dim = inputs[0].shape
    D = mixer.d_inner
    shapes = (None if weight is None else weight.shape for weight in mixer.inner_weights())
    inner = MambaInnerArguments((B, L, 2 * D), *shapes, mixer.rule, mixer.flags)
    scan_norm = None if mixer.scan_norm is None else mixer.scan_norm.shape
    mixer.total_ops += B * L * dim * 3 * D + mamba_inner_flops(inner, scan_norm) / 2
