"""Layers of models made for export: torch's own operators, with few nodes in the captured graph."""

from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import Tensor, fx, nn

from ..ops.arguments import ScanArguments
from ..ops.exportable import mamba_inner_exportable, rms_norm_exportable
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

    def forward(self, x: Tensor, grid: list[int] | None = None, valid: Tensor | None = None) -> Tensor:
        """As `Mixer.forward`."""
        if valid is not None:
            return super().forward(x, grid, valid)
        options: Any = {} if self.scan_function is None else {"scan_function": self.scan_function}  # none for fx
        xz, weights = self.in_proj(x), self.weights()
        y = mamba_inner_exportable(xz, weights, self.scan_norm, self.rule, self.flags, grid, **options)
        return self.out_proj(y)

    def __prepare_scriptable__(self) -> nn.Module:
        """Called by torch.jit.script, which cannot compile these operators. Raises TypeError."""
        remedy = "make it without, or call torch.jit.trace"
        raise TypeError(f"torch.jit.script does not take a model made with exportable=True: {remedy}")


CLASSES: dict[type, type] = {RMSNorm: ExportableNorm, Mixer: ExportableMixer}


def make_exportable(model: nn.Module) -> nn.Module:
    """Replaces the classes of norms and mixers in a model, in place, and returns it."""
    return replace_classes(model, CLASSES)


def replace_classes(model: nn.Module, classes: Mapping[type, type]) -> nn.Module:
    """Gives each module of a model, in place, the class that `classes` has for its own; returns the model."""
    for module in model.modules():
        module.__class__ = classes.get(type(module), type(module))
    return model
