"""What fixed scales of activations would change in int8: `python benchmarks/int8_scales.py [FOLDER]`.

`--to ort --precision int8` gives each row of a product a scale of its own. Here the inputs of all linear layers and of
the stem's second convolution are rounded so, or with one scale for each layer, which comes from every 100th image of
FOLDER/train: its largest magnitude, or the 99.99th percentile. Smoothed: channels with large inputs are divided, and
their weights multiplied, by the root of the ratio of their largest values. Prints top-1 on all of FOLDER/val
(data/icons, of studies/data/icons.py), and how often it is that in float32. The arithmetic is torch's.
"""

from __future__ import annotations

import sys
from pathlib import Path

import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_model_data_config
from torch import Tensor, nn

import vilonghorn  # noqa: F401  (registers the models)

BATCH = 100


def rounded(x: Tensor, scale: Tensor) -> Tensor:
    """x in steps of scale / 127."""
    step = (scale / 127).clamp_min(1e-30)
    return (x / step).round().clamp(-127, 127) * step


def of_channels(x: Tensor, layer: nn.Module) -> Tensor:
    """The largest magnitude of each input channel."""
    return x.abs().movedim(-1 if isinstance(layer, nn.Linear) else 1, 0).flatten(1).amax(1)


@torch.no_grad()
def main(folder: Path) -> None:
    """Measures and prints."""
    model = timm.create_model("vilonghornv2_nano.icons480", pretrained=True, exportable=True).eval()
    transform = create_transform(**resolve_model_data_config(model))
    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) or name == "stem.conv2"}
    largest, percentile, channels = (dict[str, Tensor]() for _ in range(3))

    def scores(files: list[Path]) -> Tensor:
        batches = (files[start : start + BATCH] for start in range(0, len(files), BATCH))
        load = lambda file: transform(Image.open(file).convert("RGB"))  # noqa: E731
        return torch.cat([model(torch.stack([load(file) for file in batch])) for batch in batches])

    def calibrate(name: str, layer: nn.Module, x: Tensor) -> None:
        size = x.abs().flatten()
        high = size.kthvalue(round(0.9999 * len(size))).values
        for values, value in ((largest, size.max()), (percentile, high), (channels, of_channels(x, layer))):
            values[name] = torch.maximum(values.get(name, value), value)

    def hooked(files: list[Path], visit) -> Tensor:  # noqa: ANN001
        handles = [
            layer.register_forward_pre_hook(lambda layer, given, name=name: visit(name, layer, given[0]))
            for name, layer in layers.items()
        ]
        out = scores(files)
        for handle in handles:
            handle.remove()
        return out

    hooked(sorted((folder / "train").glob("*/*"))[::100], calibrate)
    files = sorted((folder / "val").glob("*/*"))
    names = sorted(path.name for path in (folder / "val").iterdir())
    labels, exact = torch.tensor([names.index(file.parent.name) for file in files]), scores(files)
    weights = {name: layer.weight.clone() for name, layer in layers.items()}
    print(f"{len(files)} images; float32: top-1 {100 * (exact.argmax(1) == labels).float().mean():.2f}")
    for title, fixed, smooth in (
        ("each row", None, False),
        ("each row, smoothed", None, True),
        ("fixed, largest", largest, False),
        ("fixed, percentile", percentile, False),
    ):
        factors = {}
        for name, layer in layers.items():
            ratio = channels[name] / of_channels(weights[name], nn.Identity()).clamp_min(1e-6)
            factors[name] = ratio.clamp_min(1e-6).sqrt() if smooth else torch.ones_like(ratio)
            factors[name] = factors[name] if weights[name].ndim == 2 else factors[name][:, None, None]
            weight = weights[name] * factors[name]
            shape = len(weight), *[1] * (weight.ndim - 1)
            layer.weight.copy_(rounded(weight, weight.abs().flatten(1).amax(1).view(shape)))

        def quantize(name: str, layer: nn.Module, x: Tensor) -> tuple[Tensor]:
            x = x / factors[name]  # noqa: B023
            rows = x.abs().amax(-1 if isinstance(layer, nn.Linear) else (1, 3), keepdim=True)
            return (rounded(x, fixed[name] if fixed else rows),)  # noqa: B023

        best = hooked(files, quantize).argmax(1)
        right, same = ((best == other).float().mean() for other in (labels, exact.argmax(1)))
        print(f"{title}: top-1 {100 * right:.2f}, as float32 {100 * same:.2f}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "data/icons"))
