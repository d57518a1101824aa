"""Runs a mixer under autocast with fewer conversions of its weights; `mixer` says what is computed."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from ..ops._torch import autocast_dtype, is_tracing, is_unchanged
from ..ops.backends import cpu

CLASSES = (nn.Parameter, Tensor, FakeTensor)  # of weights; other subclasses of tensors may store something else


@torch.jit.unused
def run(mixer: Any, x: Tensor, grid: list[int] | None) -> Tensor | None:
    """The result of a `Mixer` under autocast, or None where autocast converts nothing or the modules have to be called.

    All projections are converted at once: one launch instead of four, and one in backward. A CPU with the native
    library runs in float32.
    """
    dtype = None if is_tracing(x) and not torch.compiler.is_compiling() else autocast_dtype(x)
    if dtype is None or mixer.x_proj is None or dtype == mixer.x_proj.dtype or cpu.unavailable(x.device.type) is None:
        return None
    weights = (mixer.in_proj.weight, mixer.x_proj, mixer.dt_proj, mixer.out_proj.weight)
    layers = (mixer.in_proj, mixer.out_proj)
    if not all(is_unchanged(layer, nn.Linear) and layer.bias is None for layer in layers):
        return None
    if not all(type(weight) in CLASSES for weight in weights):
        return None
    short = torch.cat([weight.flatten() for weight in weights]).to(dtype)
    parts = short.split([weight.numel() for weight in weights])
    in_proj, x_proj, dt_proj, out_proj = (part.view(weight.shape) for part, weight in zip(parts, weights))
    inner = mixer.weights()._replace(x_proj=x_proj, dt_proj=dt_proj)
    options = (mixer.scan_norm, mixer.rule, mixer.flags, grid)
    return F.linear(torch.ops.vilonghorn.mamba_inner(F.linear(x, in_proj), *inner, *options), out_proj)
