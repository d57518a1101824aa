"""Draws the maps of one image as a figure: a row for each direction or quantity, a column for each block."""

import textwrap
from collections.abc import Sequence
from typing import NamedTuple

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from ..engine.report import fit_text, shorten
from ..inference import LoadedModel
from .model import (
    CLASS_TOKEN,
    attention,
    block_index,
    grad_cam,
    grid_of,
    memory,
    patch_token,
    pca,
    receptive_field,
    to_map,
)

KINDS = {
    "attention": "implicit attention",
    "field": "receptive field",
    "memory": "state memory",
    "pca": "principal components",
    "cam": "Grad-CAM",
}
EXPLANATIONS = {
    "attention": "How strongly the class token reads each patch in the scan of a block. That token is in the middle "
    "of the sequence: the forward scan reads the upper half of the image before it, the backward scan the lower half.",
    "field": "On which pixels the features of the framed patch depend, by their gradient. A larger field means that "
    "the patch has information from farther away.",
    "memory": "For how many tokens more than half of a patch stays in the state of the scan (white: to the end), and "
    "the share of it that is left when the class token is read.",
    "pca": "Patches of similar colour have similar features after a block. The colours are the first three principal "
    "components of the features, as red, green and blue.",
    "cam": "Which patches raise the score of the class below. In later blocks, the features of a patch also have "
    "information from other patches.",
}
COLORMAP = "plasma"  # of matplotlib; pca draws its three components as red, green and blue
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
    prediction: str | None = None  # the most probable class with its probability, None without a classifier


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
    by_direction = (set(flags) for flags in zip(*(model.blocks[b].mixer.reverse for b in blocks)))
    directions = ["in turn" if len(f) > 1 else "backward" if True in f else "forward" for f in by_direction]
    if kind == "field" and patch is None:
        patch = (grid[0] // 2, grid[1] // 2)
    token, name, box = CLASS_TOKEN, "the class token", None
    if patch is not None:
        token, name = patch_token(grid, *patch), f"patch {patch[0]},{patch[1]}"
        (dy, dx), (height, width) = model.patch_embed.stride, model.patch_embed.patch_size
        box = (patch[1] * dx, patch[0] * dy, width, height)

    prediction = None
    if model.num_classes and model.global_pool:
        with torch.no_grad():
            probabilities = model(images).float().softmax(1)[0]
        best = int(probabilities.argmax())
        prediction = f"Prediction: {loaded.class_name(best)} {probabilities[best]:.0%}"
        target = best if target is None else target

    if kind == "attention":
        maps = to_map(attention(model, images, blocks, [token])[:, :, 0, 0], grid)
        rows = [Row(label, list(maps[:, g])) for g, label in enumerate(directions)]
        rows += [Row("both", list(maps.mean(1)))] if len(directions) > 1 else []
        title = f"Implicit attention: how strongly {name} reads each patch (mean magnitude of the scan's weights)"
    elif kind == "memory":
        half_lives, fractions = (to_map(values[:, :, 0], grid) for values in memory(model, images, blocks))
        rows = [Row(f"{label}:\nhalf-life", list(half_lives[:, g]), "tokens") for g, label in enumerate(directions)]
        rows.append(Row("left at the\nclass token", list(fractions.amax(1)), "share"))
        title = "State memory: how long each patch is remembered (white: to the end of the scan)"
    elif kind == "field":
        rows = [Row("gradient", [receptive_field(model, images, b, token)[0].sqrt() for b in blocks])]
        title = f"Receptive field: pixels on which {name} depends (root of the gradient's magnitude)"
    elif kind == "pca":
        rows = [Row("components", [pca(model, images, b)[0] for b in blocks])]
        title = "Principal components as red, green and blue: patches of similar colour have similar features"
    else:
        rows = [Row("Grad-CAM", [grad_cam(model, images, [target], b)[0] for b in blocks])]
        title = f"Grad-CAM of class {loaded.class_name(target)}: patches that raise its score"
    return Sheet(title, blocks, rows, box, prediction)


def draw(sheet: Sheet, picture: Tensor, columns: int | None = None) -> Figure:
    """Draws a sheet of `make_sheet` over the image. Texts are fitted to the room that they have, by `fit_text`.

    Args:
        sheet: the maps.
        picture: the image (H, W, 3) in [0, 1], as `LoadedModel.denormalize` returns it.
        columns: maps side by side, for narrow pages. Default: those of all blocks, after the image itself.
    """
    height, width = picture.shape[:2]
    w, h = 1.6 * (width / height) ** 0.5, 1.6 * (height / width) ** 0.5  # of a map; all sizes are in inches
    w, h = w * min(1, 2.4 / max(w, h)), h * min(1, 2.4 / max(w, h))
    column, line = max(w, 0.75), max(h, 0.6)  # room for the texts above and beside a small map
    above = 0.4 if any(row.unit is None and row.maps[0].dim() == 2 for row in sheet.rows) else 0.25
    per_line = columns or len(sheet.blocks)
    parts = [range(start, len(sheet.blocks))[:per_line] for start in range(0, len(sheet.blocks), per_line)]
    lines = [(row, part) for row in sheet.rows for part in parts]
    left = 0.45 if columns else column + 0.55
    right = left + per_line * (column + 0.1) - 0.1
    page_width = max(3, right + 0.7)
    text_width = page_width - (1.3 if columns else 0.2)  # a page has buttons in this corner
    texts = [
        (12, 0.24, textwrap.wrap(shorten(sheet.prediction or "", 60), int(text_width / 0.11))),
        (9, 0.18, textwrap.wrap(shorten(sheet.title, 160), int(text_width / 0.075))),
    ]
    top = 0.15 + sum(spacing * len(wrapped) for _, spacing, wrapped in texts)
    page_height = top + len(lines) * (line + above) + 0.1
    figure, y = Figure(figsize=(page_width, page_height)), 0.1
    for size, spacing, wrapped in texts:
        place = 0.1 / page_width, 1 - y / page_height
        text = figure.text(*place, "\n".join(wrapped), fontsize=size, va="top", parse_math=False)
        fit_text(text, text_width, spacing * max(1, len(wrapped)))
        y += spacing * len(wrapped)
    frame = dict(xticks=[], yticks=[], xlim=(0, width), ylim=(height, 0))
    grid = dict(left=left / page_width, right=(right - column + w) / page_width, wspace=(column + 0.1) / w - 1)
    grid |= dict(top=1 - (top + above) / page_height, bottom=(0.1 + line - h) / page_height)
    grid |= dict(hspace=(line + above) / h - 1)
    axes = figure.subplots(len(lines), per_line, squeeze=False, subplot_kw=frame, gridspec_kw=grid)
    if not columns:
        place = axes[0, 0].get_position()
        axis = figure.add_axes((0.1 / page_width, place.y0, place.width, place.height), **frame)
        axis.imshow(picture.numpy(), extent=(0, width, height, 0), interpolation="nearest")
        fit_text(axis.set_title("image", fontsize=8, pad=3), column, above - 0.1)
    for (row, part), row_axes in zip(lines, axes):
        maps = [values.detach().cpu().float() for values in row.maps]
        shared = _scale(maps) if row.unit else None
        fit_text(row_axes[0].set_ylabel(row.label, fontsize=8), 0.3, line)
        for axis in row_axes[len(part) :]:
            axis.set_axis_off()
        for number, axis in zip(part, row_axes):
            values, title = maps[number], f"block {sheet.blocks[number]}"
            _draw_map(axis, values, picture, shared or _scale([values]))
            title += f"\nmax {values.max():.2g}" if shared is None and values.dim() == 2 else ""
            fit_text(axis.set_title(title, fontsize=8, pad=3), column, above - 0.1)
            if sheet.box is not None:
                axis.add_patch(Rectangle(sheet.box[:2], *sheet.box[2:], fill=False, edgecolor="cyan"))
        if maps[0].dim() == 2:
            bar = figure.colorbar(
                ScalarMappable(shared or Normalize(0, 1), _colors()),
                cax=row_axes[-1].inset_axes((1 + 0.1 / w, 0, 0.1 / w, 1)),
                extend="max" if row.unit and any(values.isinf().any() for values in maps) else "neither",
            )
            bar.ax.set_facecolor("gray")  # on which the colours are transparent, as on the image
            ticks = MaxNLocator(max(1, int(h / 0.3)), steps=[1, 2, 5, 10], min_n_ticks=1).tick_values(0, bar.vmax)
            ticks = [tick for tick in ticks if 0 <= tick <= bar.vmax]
            bar.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks], fontsize=7)
            bar.set_label(row.unit or "of maximum", fontsize=8)
            fit_text(bar.ax.yaxis.label, 0.2, line)
    return figure


def _colors() -> ListedColormap:
    """COLORMAP, of which the opacity grows from 0 with the value."""
    colors = matplotlib.colormaps[COLORMAP](np.linspace(0, 1, 256))
    colors[:, 3] = 0.75 * np.linspace(0, 1, 256) ** 0.5
    return ListedColormap(colors).with_extremes(over=(1, 1, 1, 0.75))


def _draw_map(axis: Axes, values: Tensor, picture: Tensor, scale: Normalize) -> None:
    """Draws a map over the image in gray. Infinite values are white."""
    place = dict(extent=(0, picture.shape[1], picture.shape[0], 0), interpolation="nearest")
    gray = 0.1 + 0.7 * picture.mean(-1)  # so that colours differ from white and black
    axis.imshow(gray.numpy(), **place, cmap="gray", vmin=0, vmax=1)
    if values.dim() == 3:
        axis.imshow(values.numpy(), **place, alpha=0.6)
    else:
        finite = values.nan_to_num(posinf=2 * scale.vmax)  # matplotlib does not draw infinite values
        axis.imshow(finite.numpy(), **place, cmap=_colors(), norm=scale)


def _scale(maps: list[Tensor]) -> Normalize:
    """A scale from 0 to the largest finite value."""
    finite = torch.cat([values[values.isfinite()] for values in maps])
    return Normalize(0, (float(finite.max()) if len(finite) else 0) or 1.0)
