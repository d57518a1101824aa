"""Why a recurrence loses accuracy on enlarged icons: the weights of icons, with the scan changed after training.

    npm pack @iconify/json@2.2.535
    python studies/data/icons.py data/icons
    python studies/extrapolation.py     # 5 minutes of a core

The first 2,000 held-out icons in a random order, enlarged. `windows` lets the scan start anew in square windows of the
size of training, which overlap and are averaged. `resized` resizes its inputs to the grid of training and its result
back. Either way it reads as many tokens as in training. `none` keeps only the skip connection of the scan. Results:
results/extrapolation.json.
"""

import math
import random
import sys
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor

from vilonghorn.data.atomic_files import write_json
from vilonghorn.engine.environment import machine
from vilonghorn.ops import scan

MODEL, TRAINED, SIDES, COUNT, BATCH = "vilonghornv2_nano.icons480", 64, (64, 96, 128), 2000, 100
RESULTS = Path("studies/results/extrapolation.json")


def read_icons(folder: Path) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of images of TRAINED pixels in [-1, 1], and their labels."""
    classes = {path.name: label for label, path in enumerate(sorted(folder.iterdir()))}
    files = sorted(folder.glob("*/*.png"))
    random.Random(0).shuffle(files)
    for start in range(0, COUNT, BATCH):
        part = files[start : start + BATCH]
        images = torch.stack([pil_to_tensor(Image.open(file).convert("RGB")) for file in part])
        yield images / 127.5 - 1, torch.tensor([classes[file.parent.name] for file in part])


def resize(tokens: Tensor, side: int) -> Tensor:
    """Resizes a square grid of tokens, (..., L, C), to `side` rows and columns."""
    maps = tokens.flatten(0, -3).transpose(1, 2).unflatten(2, (math.isqrt(tokens.shape[-2]),) * 2)
    maps = F.interpolate(maps, size=side, mode="bilinear", antialias=True)
    return maps.flatten(2).transpose(1, 2).reshape(*tokens.shape[:-2], side * side, -1)


def changed_scan(how: str, pixels: int, *tokens: Tensor, z: Tensor, D: Tensor, **options: Any) -> Tensor:
    """The mean over directions of `scan` of u, dt, k and q on the grid of an image of `pixels`, gated by z."""
    side = math.isqrt(z.shape[1])
    trained = side * TRAINED // pixels
    run, skip = partial(scan, **options), (tokens[0] * D[:, None, None]).mean(0)
    if how == "as trained":
        y = run(*tokens)
    elif how == "none":
        y = torch.zeros_like(skip)
    elif how == "resized":
        y = resize(run(*(resize(t, trained) for t in tokens)), side)
    else:
        starts = sorted({0, (side - trained) // 2, side - trained})
        y, count = torch.zeros_like(skip), torch.zeros(z.shape[1], 1)
        numbers = torch.arange(side * side).reshape(side, side)
        for top, left in product(starts, repeat=2):
            inside = numbers[top : top + trained, left : left + trained].flatten()
            y[:, inside] += run(*(t[:, :, inside].contiguous() for t in tokens))
            count[inside] += 1
        y = y / count
    return (y + skip) * F.silu(z)


@torch.inference_mode()
def main() -> None:
    """Prints and writes the accuracy of each size and change."""
    torch.set_num_threads(1)
    model = timm.create_model(MODEL, pretrained=True).eval()
    batches, rows = list(read_icons(Path("data/icons/val"))), []
    for pixels in SIDES:
        for how in ("as trained", "windows", "resized", "none"):
            sys.modules["vilonghorn.ops.mamba_inner"].scan = partial(changed_scan, how, pixels)
            right = 0
            for images, labels in batches:
                larger = F.interpolate(images, size=pixels, mode="bicubic", antialias=True).clamp(-1, 1)
                mask = torch.ones(len(images), pixels, pixels, dtype=torch.bool)  # lets separate operators run
                logits = model.forward_head(model.forward_features(larger, pixel_mask=mask))
                right += (logits.argmax(1) == labels).sum().item()
            rows.append({"pixels": pixels, "scan": how, "top1": round(100 * right / COUNT, 2)})
            print(rows[-1], flush=True)
    command = ["python", "studies/extrapolation.py"]
    write_json(RESULTS, {"command": command, "machine": machine(), "model": MODEL, "images": COUNT, "rows": rows})


if __name__ == "__main__":
    main()
