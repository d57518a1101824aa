"""Files with weights in float16 or int8: option `--precision` of the export.

The graph of such a file begins with the conversion of its weights to float32. onnxruntime converts them once, when it
opens the file.
"""

import copy
from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..layers import Mixer

PRECISIONS = ("fp32", "fp16", "int8")


def quantize(weight: Tensor, dims: tuple[int, ...] = (-1,)) -> tuple[Tensor, Tensor]:
    """Rounds float32 weights of any shape to int8, from -127 to 127, symmetrically: weight is about number * scale.

    `dims` share a scale; those of the inputs of a linear layer give one for each output channel. Returns numbers and
    scales, float32, of size 1 in `dims`.
    """
    scale = weight.abs().amax(dims, keepdim=True) / 127
    scale = torch.where(scale > 0, scale, 1.0)
    return (weight / scale).round().to(torch.int8), scale


def stored_weights(model: nn.Module, precision: str) -> dict[str, tuple[Tensor, ...]]:
    """What a file stores in place of parameters, by the name of the parameter.

    With "fp32" nothing; with "fp16" float16 numbers, of all parameters (ValueError if one is too large); with "int8"
    what `quantize` returns, of linear layers, x_proj, dt_proj and the patch embedding.
    """
    if precision == "fp16":
        stored = {name: (parameter.half(),) for name, parameter in model.named_parameters()}
        if too_large := [name for name, (short,) in stored.items() if not short.isfinite().all()]:
            problem = f"{too_large[0]} contains values that are infinite in float16 (above 65504)"
            raise ValueError(f"--precision fp16: {problem}; export with --precision fp32 or int8")
        return stored
    stored = {}
    for prefix, module in model.named_modules() if precision == "int8" else ():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            stored[f"{prefix}.weight"] = quantize(module.weight, tuple(range(1, module.weight.dim())))
        elif isinstance(module, Mixer):
            layers = ((name, getattr(module, name)) for name in ("x_proj", "dt_proj"))  # None without a rule
            stored |= {f"{prefix}.{name}": quantize(weight) for name, weight in layers if weight is not None}
    return stored


def restore(short: Tensor, scale: Tensor | None = None) -> Tensor:
    """The float32 weight of what `stored_weights` returns."""
    return short.float() if scale is None else short.float() * scale


@torch.no_grad()
def round_weights(model: nn.Module, precision: str) -> nn.Module:
    """A frozen float32 copy of a model, in evaluation mode, with a file's weights; errors as of `stored_weights`."""
    model = copy.deepcopy(model).eval().float().requires_grad_(False)
    parameters = dict(model.named_parameters())
    for name, parts in stored_weights(model, precision).items():
        parameters[name].copy_(restore(*parts))
    return model


class ShortWeights(nn.Module):
    """A model of `round_weights` to be captured: weights, but those `skipped`, are short, and converted in forward."""

    def __init__(self, model: nn.Module, precision: str, skipped: Collection[str] = ()) -> None:
        super().__init__()
        self.model = model
        self.parts: dict[str, list[str]] = {}  # of a parameter, the names of the buffers
        for name, parts in stored_weights(model, precision).items():
            if name in skipped:
                continue
            self.parts[name] = [f"{name.replace('.', '_')}_{part}" for part in ("short", "scale")[: len(parts)]]
            for buffer, tensor in zip(self.parts[name], parts):
                self.register_buffer(buffer, tensor)

    def forward(self, images: Tensor) -> Tensor | list[Tensor]:
        """Runs the model with the converted weights."""
        restored = {name: restore(*map(self.get_buffer, parts)) for name, parts in self.parts.items()}
        return functional_call(self.model, restored, (images,))
