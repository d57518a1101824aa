"""Draws the maps of one image as a figure: a row for each direction or quantity, a column for each block."""

from collections.abc import Sequence
from typing import NamedTuple

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle
from torch import Tensor

from ..tools.loaded_model import LoadedModel
from .model import attention, grad_cam, memory, pca, receptive_field
from .tokens import CLASS_TOKEN, block_index, check_classifier, grid_of, patch_token, to_map

KINDS = {
    "attention": "implicit attention",
    "field": "receptive field",
    "memory": "state memory",
    "pca": "principal components",
    "cam": "Grad-CAM",
}
COLORMAP = "inferno"  # of matplotlib; pca draws its three components as red, green and blue
MAX_BLOCKS = 6  # columns, if no blocks are chosen


class Row(NamedTuple):
    """Maps of one direction or quantity."""

    label: str
    maps: list[Tensor]  # for each block (h, w) values, or (h, w, 3) colours in [0, 1]
    unit: str | None = None  # of the scale that the maps share; None: each map is scaled to its own maximum


class Sheet(NamedTuple):
    """All maps of an image, a row for each direction or quantity and a column for each block."""

    title: str
    blocks: list[int]  # numbers from 0
    rows: list[Row]
    box: tuple[int, int, int, int] | None = None  # left, top, width and height of the patch that attends or sees


def make_sheet(
    loaded: LoadedModel,
    image: Tensor,
    kind: str,
    *,
    blocks: Sequence[int] | None = None,
    patch: tuple[int, int] | None = None,
    target: int | None = None,
) -> Sheet:
    """Computes the maps of an image.

    Args:
        loaded: a model of this library.
        image: the model's input, (3, H, W).
        kind: one of `KINDS`.
        blocks: numbers of blocks. Default: up to MAX_BLOCKS, evenly spaced up to the last one, or up to the last but
            one for "cam" of a model that classifies by the class token.
        patch: row and column of a patch. Default: the class token for "attention", the middle patch for "field".
        target: class for "cam". Default: the most probable one.

    Raises:
        ValueError: unknown kind, block, patch or class.
        TypeError: the model is not of this library.
    """
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}, expected one of {', '.join(map(repr, KINDS))}")
    model, images = loaded.model, image[None].to(loaded.device)
    grid = grid_of(model, images)
    if blocks is None:
        usable = max(1, len(model.blocks) - (kind == "cam" and model.global_pool == "token"))
        blocks = sorted({round(i) for i in np.linspace(0, usable - 1, MAX_BLOCKS)})
    blocks = [block_index(model, block) for block in blocks]
    directions = ["backward" if flag else "forward" for flag in model.blocks[0].mixer.reverse]
    if kind == "field" and patch is None:
        patch = (grid[0] // 2, grid[1] // 2)
    token, name, box = CLASS_TOKEN, "the class token", None
    if patch is not None:
        token, name = patch_token(grid, *patch), f"patch {patch[0]},{patch[1]}"
        (dy, dx), (height, width) = model.patch_embed.stride, model.patch_embed.patch_size
        box = (patch[1] * dx, patch[0] * dy, width, height)

    if kind == "attention":
        maps = to_map(attention(model, images, blocks, [token])[:, :, 0, 0], grid)
        rows = [Row(label, list(maps[:, g])) for g, label in enumerate(directions)]
        rows += [Row("both", list(maps.mean(1)))] if len(directions) > 1 else []
        return Sheet(f"Implicit attention of {name}: weights of the scan, mean magnitude", blocks, rows, box)
    if kind == "memory":
        half_lives, fractions = (to_map(values[:, :, 0], grid) for values in memory(model, images, blocks))
        rows = [Row(f"{label}: half-life", list(half_lives[:, g]), "tokens") for g, label in enumerate(directions)]
        rows.append(Row("left at the\nclass token", list(fractions.amax(1)), "share"))
        return Sheet("State memory: how long each token is remembered", blocks, rows)
    if kind == "field":
        row = Row("root of gradient", [receptive_field(model, images, b, token)[0].sqrt() for b in blocks])
        return Sheet(f"Effective receptive field of {name}", blocks, [row], box)
    if kind == "pca":
        row = Row("red, green, blue", [pca(model, images, b)[0] for b in blocks])
        return Sheet("First three principal components of the patches", blocks, [row])
    check_classifier(model)
    if target is None:
        with torch.no_grad():
            target = int(model(images).argmax())
    row = Row("Grad-CAM", [grad_cam(model, images, [target], b)[0] for b in blocks])
    return Sheet(f"Grad-CAM of class {loaded.class_name(target)}", blocks, [row])


def draw(sheet: Sheet, picture: Tensor) -> Figure:
    """Draws a sheet of `make_sheet`, beside and over the image (H, W, 3) in [0, 1]."""
    num_rows, num_columns = len(sheet.rows), 1 + len(sheet.blocks)
    height, width = picture.shape[:2]
    size = (1.6 * num_columns + 1.2, (1.6 * height / width + 0.35) * num_rows + 0.6)  # inches
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(sheet.title, fontsize=11, parse_math=False)
    frame = dict(xticks=[], yticks=[], xlim=(0, width), ylim=(height, 0))
    axes = figure.subplots(num_rows, num_columns, squeeze=False, subplot_kw=frame)
    for axis in axes[1:, 0]:
        axis.set_axis_off()
    axes[0, 0].imshow(picture.numpy(), extent=(0, width, height, 0), interpolation="nearest")
    axes[0, 0].set_title("image", fontsize=8)
    for row, row_axes in zip(sheet.rows, axes[:, 1:]):
        row_axes[0].set_ylabel(row.label, fontsize=8)
        maps = [values.detach().cpu().float() for values in row.maps]
        shared = _scale(maps) if row.unit else None
        for block, values, axis in zip(sheet.blocks, maps, row_axes):
            shown = _draw_map(axis, values, picture, shared or _scale([values]))
            own_maximum = shared is None and values.dim() == 2
            axis.set_title(f"block {block}" + (f", max {values.max():.2g}" if own_maximum else ""), fontsize=8)
            if sheet.box is not None:
                axis.add_patch(Rectangle(sheet.box[:2], *sheet.box[2:], fill=False, edgecolor="cyan"))
        if row.unit:
            extend = "max" if any(values.isinf().any() for values in maps) else "neither"
            bar = figure.colorbar(shown, ax=row_axes.tolist(), fraction=0.05, pad=0.01, extend=extend)
            bar.set_label(row.unit, fontsize=8)
            bar.ax.tick_params(labelsize=7)
    return figure


def _draw_map(axis: Axes, values: Tensor, picture: Tensor, scale: Normalize) -> AxesImage:
    """Draws a map over the pale image. Infinite values are white."""
    place = dict(extent=(0, picture.shape[1], picture.shape[0], 0), interpolation="nearest")
    if values.dim() == 3:
        return axis.imshow(values.numpy(), **place)
    pale = 0.3 + 0.4 * picture.mean(-1)  # low contrast, so that the map's colours stay comparable
    axis.imshow(pale.numpy(), **place, cmap="gray", vmin=0, vmax=1)
    colors = matplotlib.colormaps[COLORMAP].with_extremes(over="white")
    finite = values.nan_to_num(posinf=2 * scale.vmax)  # matplotlib does not draw infinite values
    return axis.imshow(finite.numpy(), **place, cmap=colors, norm=scale, alpha=0.8)


def _scale(maps: list[Tensor]) -> Normalize:
    """A scale from 0 to the largest finite value."""
    finite = torch.cat([values[values.isfinite()] for values in maps])
    return Normalize(0, max(float(finite.max()), 1e-12) if len(finite) else 1.0)
