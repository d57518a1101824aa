"""Makes the table of docs/models.md out of the registry: `python -m vilonghorn.tools.model_table`.

Nothing is measured: parameters are counted, operations are the flop counter's, and memory is what autograd keeps of one
image, all on tensors without storage. Around the table, the page is written by hand.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import timm
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from vilonghorn.data.files import replacing

PAGE = Path("docs/models.md")
MARK = re.compile(r"(<!-- models[^>]*-->\n).*?(<!-- end of models -->)", re.DOTALL)
SIZES = (224, 512)
ORDER = ("nano", "tiny", "small", "base")
FAMILIES = ("vilonghorn", "vim")
TOKENS = ("", "stride8", "sfp")


class Cost(NamedTuple):
    """What one image costs a model."""

    gmacs: float  # multiply-adds of a forward pass, in 10^9: what papers call GFLOPs
    training_mb: float  # what a forward pass in training keeps for backward in float32, in 10^6 bytes


def names() -> list[str]:
    """The registered models, by family, form and size."""
    found = [name for family in FAMILIES for name in timm.list_models(module=family)]

    def place(name: str) -> tuple[int, int, str, int]:
        family, size, *form = name.split("_")
        tokens = form.pop() if form and form[-1] in TOKENS else ""
        return FAMILIES.index(family), TOKENS.index(tokens), "".join(form), ORDER.index(size)

    return sorted(found, key=place)


def cost(name: str, size: int) -> Cost:
    """What an image of size x size costs a registered model, from one and two of its equal blocks.

    Args:
        name: of the model.
        size: height and width, in pixels.
    """
    one, two = count(name, size, depth=1), count(name, size, depth=2)
    more = len(timm.create_model(name, device="meta").blocks) - 1
    return Cost(*(first + more * (second - first) for first, second in zip(one, two)))


def count(name: str, size: int, **kwargs: int) -> Cost:
    """Counts what an image of size x size costs a registered model, changed by `kwargs`."""
    model = timm.create_model(name, img_size=size, device="meta", **kwargs).train()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = model.to_empty(device="cpu")
        image = torch.empty(1, 3, size, size)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(image)
        return Cost(counter.get_total_flops() / 2e9, kept_for_backward(model, image) / 1e6)


def kept_for_backward(model: nn.Module, images: Tensor) -> int:
    """Bytes that a forward pass keeps for backward, besides parameters and the images themselves."""
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), images)}
    kept = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(images)
    return sum(storage.nbytes() for storage in kept.values())


def table() -> str:
    """The table, in Markdown."""
    head = ["model", "rule", "directions", "width x blocks", "patches at 224"]
    head += [
        "parameters (M)",
        *(f"GFLOPs at {size}" for size in SIZES),
        *(f"training memory at {size} (MB)" for size in SIZES),
    ]
    rows = [head, ["---"] * 4 + ["---:"] * (len(head) - 4)]
    for name in names():
        model = timm.create_model(name, device="meta")
        mixer, (H, W) = model.blocks[0].mixer, model.patch_embed.grid_size
        costs = [cost(name, size) for size in SIZES]
        rows.append(
            [
                f"`{name}`",
                mixer.rule,
                "separate" if mixer.scan_norm is None else "shared",
                f"{model.embed_dim} x {len(model.blocks)}",
                f"{H} x {W}",
                f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}",
                *(f"{c.gmacs:.2f}" for c in costs),
                *(f"{c.training_mb:.0f}" for c in costs),
            ]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def page(text: str) -> str:
    """The page with the table as the registry has it now.

    Raises:
        ValueError: the page has no marks.
    """
    if not MARK.search(text):
        raise ValueError(
            f"{PAGE} lacks the marks <!-- models --> and <!-- end of models -->: put them around its table"
        )
    made = table()
    return MARK.sub(lambda match: f"{match[1]}{made}\n{match[2]}", text)


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the page, in the working directory; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m vilonghorn.tools.model_table", description=__doc__.splitlines()[0])
    parser.parse_args(argv)
    if not PAGE.is_file():
        parser.error(f"there is no {PAGE} here: run it in the root of a checkout")
    try:
        text = page(PAGE.read_text(encoding="utf-8"))
    except ValueError as error:
        parser.error(str(error))
    with replacing(PAGE) as file:
        file.write(text.encode())
    print(f"{PAGE} has the figures of {len(names())} models")
    return 0


if __name__ == "__main__":
    sys.exit(main())
