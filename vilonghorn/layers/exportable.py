"""Layers of models made for export: torch's own operators, with few nodes in the captured graph."""

from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import Tensor, fx, nn

from ..ops.arguments import ScanArguments
from ..ops.mamba_inner import mamba_inner_exportable
from ..ops.norm import rms_norm_exportable
from .mixer import Mixer
from .norm import RMSNorm

fx.wrap("mamba_inner_exportable")
fx.wrap("rms_norm_exportable")


class ExportableNorm(RMSNorm):
    """`RMSNorm` in the operations that onnxruntime fuses into one."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalises x, (..., dim)."""
        return rms_norm_exportable(x, self.weight, cast(float, self.eps))


class ExportableMixer(Mixer):
    """`Mixer` in torch's own operators."""

    scan_function: Callable[[ScanArguments], Tensor] | None = None  # of `mamba_inner_exportable`, if not its default

    def forward(self, x: Tensor, grid: list[int] | None = None, mask: Tensor | None = None) -> Tensor:
        """As `Mixer.forward`."""
        if mask is not None:
            return super().forward(x, grid, mask)
        arguments = (*self.inner_weights(), self.scan_norm, self.rule, self.flags, grid)
        options: Any = {} if self.scan_function is None else {"scan_function": self.scan_function}  # none for fx
        return self.out_proj(mamba_inner_exportable(self.in_proj(x), *arguments, **options))


CLASSES: dict[type, type] = {RMSNorm: ExportableNorm, Mixer: ExportableMixer}


def make_exportable(model: nn.Module) -> nn.Module:
    """Replaces the classes of norms and mixers in a model, in place, and returns it."""
    return replace_classes(model, CLASSES)


def replace_classes(model: nn.Module, classes: Mapping[type, type]) -> nn.Module:
    """Gives each module of a model, in place, the class that `classes` has for its own; returns the model."""
    for module in model.modules():
        module.__class__ = classes.get(type(module), type(module))
    return model
