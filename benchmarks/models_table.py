"""Makes the table of docs/models.md from the registry: `python benchmarks/models_table.py`, in the root of a checkout.

Nothing is measured: parameters are counted, operations are those of torch's flop counter, and memory is what autograd
saves for one image, all on fake tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import timm
import torch
from page_tables import markdown, write_page
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

PAGE = Path("docs/models.md")
SIZE = 224  # pixels
ORDER = ("nano", "tiny", "small", "base")
FAMILIES = ("vilonghornv2", "vilonghorn", "vim")
TOKENS = ("", "stride8", "patch8")


class Cost(NamedTuple):
    """The cost of one image."""

    gmacs: float  # multiply-adds of a forward pass in 10^9, which papers call GFLOPs
    training_mb: float  # what a forward pass saves for backward in float32, in 10^6 bytes


def names() -> list[str]:
    """The registered models, by family, form and size."""
    found = [name for family in FAMILIES for name in timm.list_models(module=family)]

    def place(name: str) -> tuple[int, int, str, int]:
        family, size, *form = name.split("_")
        tokens = form.pop() if form and form[-1] in TOKENS else ""
        return FAMILIES.index(family), TOKENS.index(tokens), "".join(form), ORDER.index(size)

    return sorted(found, key=place)


def cost(name: str, size: int) -> Cost:
    """The cost of an image of size x size; of equal blocks, extrapolated from models of one block and of two blocks.

    Args:
        name: name of a registered model.
        size: height and width in pixels.
    """
    model = timm.create_model(name, device="meta")
    if not hasattr(model, "blocks"):  # stages
        return count(name, size)
    one, two = count(name, size, depth=1), count(name, size, depth=2)
    more = len(model.blocks) - 1
    return Cost(*(first + more * (second - first) for first, second in zip(one, two)))


def count(name: str, size: int, **kwargs: int) -> Cost:
    """Counts the cost of an image of size x size for a model with `kwargs`."""
    model = timm.create_model(name, img_size=size, device="meta", **kwargs).train()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = model.to_empty(device="cpu")
        image = torch.empty(1, 3, size, size)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(image)
        return Cost(counter.get_total_flops() / 2e9, saved_bytes(model, image) / 1e6)


def saved_bytes(model: torch.nn.Module, images: torch.Tensor) -> int:
    """Bytes that autograd saves for backward in a forward pass, without parameters and images."""
    known = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), images)}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            saved[storage._cdata] = storage  # holding it keeps its address unique
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        scores = model(images)  # noqa: F841  (keeps the graph alive)
    return sum(storage.nbytes() for storage in saved.values())


def table(models: Sequence[str]) -> str:
    """The table of some models, in Markdown."""
    lines = []
    for name in models:
        model = timm.create_model(name, device="meta")
        if hasattr(model, "blocks"):
            shape = f"{model.embed_dim} x {len(model.blocks)}"
        else:
            stages = zip(model.feature_info, model.stages)
            shape = ", ".join(f"{info['num_chs']} x {len(stage.blocks)}" for info, stage in stages)
        found = cost(name, SIZE)
        lines.append(
            {
                "model": f"`{name}`",
                "width x blocks": shape,
                "parameters (M)": f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}",
                f"GMACs at {SIZE} px": f"{found.gmacs:.2f}",
                "training memory (MB)": f"{found.training_mb:.0f}",
            }
        )
    return markdown(lines)


def main() -> int:
    """Writes the page; returns the exit status."""
    if not PAGE.is_file():
        sys.exit(f"error: there is no {PAGE} here: run it in the root of a checkout")
    write_page(PAGE, {"models": table(names())})
    return 0


if __name__ == "__main__":
    sys.exit(main())
