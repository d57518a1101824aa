"""Maps of one image as a sheet, a row for each direction or quantity and a column for each block; sheets as figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import matplotlib
import numpy as np
import torch
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from ..tools.loaded_model import Subject
from .model import attention, grad_cam, memory, pca, receptive_field
from .tokens import CLASS_TOKEN, block_index, check_classifier, grid_of, patch_token, to_map

COLUMNS = 6  # blocks on a sheet, unless they are chosen
KINDS = {
    "attention": "implicit attention",
    "field": "receptive field",
    "memory": "state memory",
    "pca": "principal components",
    "cam": "Grad-CAM",
}


class Row(NamedTuple):
    """Maps side by side.

    Attributes:
        label: what they are of.
        maps: (h, w) numbers, or (h, w, 3) colours, one for each block.
        unit: the row's maps share a scale, shown with this unit; None: each has a scale of its own, up to its maximum.
    """

    label: str
    maps: list[Tensor]
    unit: str | None = None


class Sheet(NamedTuple):
    """What is drawn: rows of maps with a column for each of `blocks`.

    Attributes:
        title: what all of it is.
        blocks: numbers from 0.
        rows: from above.
        box: left, top, width and height, in pixels, of the patch that the maps are of; None: of no patch.
    """

    title: str
    blocks: list[int]
    rows: list[Row]
    box: tuple[int, int, int, int] | None = None


def make_sheet(
    subject: Subject,
    image: Tensor,
    what: str,
    *,
    blocks: Sequence[int] | None = None,
    patch: tuple[int, int] | None = None,
    target: int | None = None,
) -> Sheet:
    """Computes the maps of an image.

    Args:
        subject: a model of this library.
        image: the model's input, (3, H, W).
        what: one of KINDS.
        blocks: numbers of blocks. Default: at most COLUMNS of them at even distances, the last one included, or, for
            "cam" where the class token alone is read out, the last but one.
        patch: row and column of the patch that attends or sees. Default: the class token for "attention", the patch in
            the middle for "field".
        target: the class that "cam" explains. Default: the most probable one.

    Raises:
        ValueError: an unknown kind, block, patch or class.
        TypeError: a model of another kind.
    """
    if what not in KINDS:
        raise ValueError(f"what is {what!r}, expected one of {', '.join(map(repr, KINDS))}")
    model, images = subject.model, image[None].to(subject.device)
    grid = grid_of(model, images)
    if what == "field" and patch is None:
        patch = (grid[0] // 2, grid[1] // 2)
    token, name, box = CLASS_TOKEN, "the class token", None
    if patch is not None:
        token, name = patch_token(grid, *patch), f"patch {patch[0]},{patch[1]}"
        (down, right), (height, width) = model.patch_embed.stride, model.patch_embed.patch_size
        box = (patch[1] * right, patch[0] * down, width, height)
    if blocks is None:
        usable = max(1, len(model.blocks) - (what == "cam" and model.global_pool == "token"))
        blocks = sorted({round(i) for i in np.linspace(0, usable - 1, COLUMNS)})
    blocks = [block_index(model, block) for block in blocks]
    directions = ["backward" if flag else "forward" for flag in model.blocks[0].mixer.reverse]
    if what == "attention":
        maps = to_map(attention(model, images, blocks, [token])[:, :, 0, 0], grid)
        rows = [Row(label, list(maps[:, g])) for g, label in enumerate(directions)]
        rows += [Row("both", list(maps.mean(1)))] if len(directions) > 1 else []
        return Sheet(f"Implicit attention of {name}: weights of the scan, mean magnitude", blocks, rows, box)
    if what == "memory":
        lives, shares = memory(model, images, blocks)
        lives, shares = (to_map(numbers[:, :, 0], grid) for numbers in (lives, shares))
        rows = [Row(f"{label}: half-life", list(lives[:, g]), "tokens") for g, label in enumerate(directions)]
        rows.append(Row("left at the\nclass token", list(shares.amax(1)), "share"))
        return Sheet("State memory: how long what a token wrote is remembered", blocks, rows)
    if what == "field":
        row = Row("root of gradient", [receptive_field(model, images, b, token)[0].sqrt() for b in blocks])
        return Sheet(f"Effective receptive field of {name}", blocks, [row], box)
    if what == "pca":
        row = Row("red, green, blue", [pca(model, images, b)[0] for b in blocks])
        return Sheet("First three principal components of the patches", blocks, [row])
    check_classifier(model)
    if target is None:
        with torch.no_grad():
            target = int(model(images).argmax())
    row = Row("Grad-CAM", [grad_cam(model, images, [target], b)[0] for b in blocks])
    return Sheet(f"Grad-CAM of class {subject.class_name(target)}", blocks, [row])


def draw(sheet: Sheet, picture: Tensor) -> Figure:
    """Draws a sheet beside and over the image.

    Args:
        sheet: of `make_sheet`.
        picture: the image as the model saw it, (H, W, 3) in [0, 1].
    """
    rows, columns = len(sheet.rows), 1 + len(sheet.blocks)
    height, width = picture.shape[:2]
    cell = 1.6
    size = (cell * columns + 1.2, (cell * height / width + 0.35) * rows + 0.6)
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(sheet.title, fontsize=11, parse_math=False)
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[], xlim=(0, width), ylim=(height, 0))
    for line in axes[1:, 0]:
        line.set_axis_off()
    faint = 0.3 + 0.4 * picture.mean(-1)  # so that the map's colours hardly depend on what is under them
    place = dict(extent=(0, width, height, 0), interpolation="nearest")
    axes[0, 0].imshow(picture.numpy(), **place)
    axes[0, 0].set_title("image", fontsize=8)
    for row, line in zip(sheet.rows, axes[:, 1:]):
        line[0].set_ylabel(row.label, fontsize=8)
        scale = _scale(row.maps) if row.unit else None
        for block, values, axis in zip(sheet.blocks, row.maps, line):
            values = values.detach().cpu().float()
            title = f"block {block}"
            if values.dim() == 3:
                axis.imshow(values.numpy(), **place)
            else:
                own = scale or Normalize(0, max(float(values.max()), 1e-12))
                axis.imshow(faint.numpy(), **place, cmap="gray", vmin=0, vmax=1)
                values = values.nan_to_num(posinf=2 * own.vmax)  # matplotlib leaves out what is infinite
                shown = axis.imshow(values.numpy(), **place, cmap=_colours(), norm=own, alpha=0.8)
                title += "" if scale else f", max {float(values.max()):.2g}"
            axis.set_title(title, fontsize=8)
            if sheet.box is not None:
                left, top, *size = sheet.box
                axis.add_patch(Rectangle((left, top), *size, fill=False, edgecolor="cyan"))
        if row.unit:
            ended = any(values.isinf().any() for values in row.maps)
            extend = "max" if ended else "neither"
            bar = figure.colorbar(shown, ax=line.tolist(), fraction=0.05, pad=0.01, extend=extend)
            bar.set_label(row.unit, fontsize=8)
            bar.ax.tick_params(labelsize=7)
    return figure


def _scale(maps: list[Tensor]) -> Normalize:
    finite = torch.cat([values[values.isfinite()].flatten().float().cpu() for values in maps])
    return Normalize(0, max(float(finite.max()), 1e-12) if len(finite) else 1.0)


def _colours() -> matplotlib.colors.Colormap:
    """Dark to bright; what the sequence's end left unknown is white."""
    return matplotlib.colormaps["inferno"].with_extremes(over="white")
