"""Draws maps of one image over the image: one map, or one for each chosen block."""

import textwrap
from collections.abc import Sequence
from typing import NamedTuple

import matplotlib
import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image
from timm.data import create_transform
from torch import Tensor

from ..figures import cut_middle, fit_text
from ..inference import LoadedModel
from ..ops.rules import RULES
from .maps import attention, block_index, blocks_of, grad_cam, grid_of, patch_token, pca, receptive_field, to_map

KINDS = dict(attention="implicit attention", field="receptive field", pca="principal components", cam="Grad-CAM")
COLORMAP = ListedColormap(matplotlib.colormaps["turbo"](np.linspace(0, 0.92, 256)))  # ends in red, not in black
OPACITY = 0.65  # of the largest value of a map, and of the colours of pca
COLUMNS = 3  # maps side by side
VIEW = 600  # pixels of the longer side of an image under its map


class Sheet(NamedTuple):
    """Maps of an image."""

    title: str
    maps: dict[str, Tensor]  # by the name of the block: (h, w) values from 0, or (h, w, 3) colours in [0, 1]
    box: tuple[float, ...] | None = None  # left, top, width and height of the patch that attends or sees, in [0, 1]
    prediction: str | None = None  # the most probable class with its probability, None without a classifier
    padded: tuple[float, float] = (1.0, 1.0)  # height and width of the grid of patches, in those of the image


def make_sheet(
    loaded: LoadedModel,
    image: Tensor,
    kind: str,
    *,
    blocks: Sequence[int] | None = None,
    patch: tuple[int, int] | None = None,
    target: int | None = None,
) -> Sheet:
    """Computes the maps of an image. An unknown kind, block, patch or class is a ValueError, as is a foreign model.

    Args:
        loaded: a model of this library.
        image: the model's input, (3, H, W).
        kind: one of `KINDS`.
        blocks: numbers of blocks, a map for each; for "attention" and "field" of one stage. Default: one map,
            "attention" of the mean over all blocks (of a hierarchy those of the first stage that scans), the others
            after the last block ("cam" of a model that classifies by the class token: the last but one).
        patch: row and column of a patch. Default: for "attention" the class token if the head reads it, else the
            average of the patches; for "field" the middle patch.
        target: class for "cam". Default: the most probable one.
    """
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}, expected one of {', '.join(map(repr, KINDS))}")
    model, images, (_, H, W) = loaded.model, image[None].to(loaded.device), image.shape
    last, reads_token = block_index(model, -1), model.global_pool == "token"
    if blocks is not None:
        chosen = [block_index(model, block) for block in blocks]
    elif kind == "attention":
        chosen = [i for i, block in enumerate(blocks_of(model)) if block.mixer.rule in RULES]
        if not chosen:
            raise ValueError("no block of the model scans, so there is no attention to draw: take field, pca or cam")
        chosen = [i for i in chosen if grid_of(model, images, i) == grid_of(model, images, chosen[0])]
    else:
        chosen = [max(0, last - (kind == "cam" and reads_token))]
    grid = grid_of(model, images, chosen[0])
    whole = model.image_size(*grid, chosen[0])  # with padding
    padded = whole[0] / H, whole[1] / W
    if kind == "field" and patch is None:
        patch = (grid[0] // 2, grid[1] // 2)
    tokens, reader = ([0], "the class token") if reads_token else (None, "the average of the patches")
    box = None
    if patch is not None:
        tokens, reader = [patch_token(grid, *patch, bool(model.num_prefix_tokens))], f"patch {patch[0]},{patch[1]}"
        (dy, dx), (height, width) = model.patches(chosen[0])
        box = (patch[1] * dx / W, patch[0] * dy / H, width / W, height / H)

    prediction = None
    if model.num_classes and model.global_pool:
        with torch.no_grad():
            probabilities = model(images).float().softmax(1)[0]
        best = int(probabilities.argmax())
        prediction = f"{loaded.class_name(best)}: {probabilities[best]:.0%}"
        target = best if target is None else target

    if kind == "attention":
        maps = to_map(attention(model, images, chosen, tokens).mean(1)[:, 0, 0], grid)
        maps = maps / maps.sum((1, 2), keepdim=True).clamp_min(torch.finfo(maps.dtype).tiny)
        title = f"Implicit attention: patches that {reader} reads"
        if blocks is None:
            name = "all blocks" if len(chosen) == last + 1 else f"blocks {chosen[0]} to {chosen[-1]}"
            return Sheet(f"{title}, mean of {name}", {name: maps.mean(0)}, box, prediction, padded)
    elif kind == "field":
        if len({grid_of(model, images, b) for b in chosen}) > 1:
            raise ValueError(f"blocks {chosen} have different grids of patches: give blocks of one stage")
        fields = [receptive_field(model, images, b, tokens[0]) for b in chosen]
        fields = [F.pad(field, (0, whole[1] - W, 0, whole[0] - H)) for field in fields]
        maps = [F.adaptive_avg_pool2d(field, grid)[0].sqrt() for field in fields]
        title = f"Receptive field: what {reader} depends on"
    elif kind == "pca":
        maps = [pca(model, images, b)[0] for b in chosen]
        title = "Principal components: patches of similar colour have similar features"
    else:
        maps = [grad_cam(model, images, [target], b)[0] for b in chosen]
        title = f"Grad-CAM: patches that raise the score of {loaded.class_name(target)}"
    return Sheet(title, {f"block {b}": values for b, values in zip(chosen, maps)}, box, prediction, padded)


def view(loaded: LoadedModel, picture: Image.Image) -> Tensor:
    """What a model sees of an RGB image, with about VIEW pixels a side, (H, W, 3) in [0, 1]."""
    channels, *sides = loaded.preprocessing["input_size"]
    factor = max(1, round(VIEW / max(sides)))
    larger = {**loaded.preprocessing, "input_size": (channels, *(factor * side for side in sides))}
    return loaded.denormalize(create_transform(**larger, is_training=False)(picture))


def draw(sheet: Sheet, picture: Tensor) -> Figure:
    """Draws maps of `make_sheet` over the image, the prediction above them. Each map is scaled to its own maximum.

    `picture`, (H, W, 3) in [0, 1], is of `view` or `LoadedModel.denormalize`.
    """
    height, width, _ = picture.shape
    columns = min(2 if len(sheet.maps) == 4 else COLUMNS, len(sheet.maps))
    rows = -(-len(sheet.maps) // columns)
    side, above = (5.8, 0.0) if columns == 1 else (2.4, 0.25)  # all sizes are in inches
    w, h = (max(0.6, side * pixels / max(height, width)) for pixels in (width, height))
    has_scale = all(values.dim() == 2 for values in sheet.maps.values())
    below = 0.55 if has_scale else 0.1
    page_width, page_height = max(4, columns * (w + 0.1) + 0.1), 0.95 + rows * (h + above) + below
    frame = dict(left=0.1 / page_width, right=1 - 0.1 / page_width, wspace=0.1 / w, hspace=above / h)
    frame |= dict(top=1 - (0.95 + above) / page_height, bottom=below / page_height)
    figure = Figure(figsize=(page_width, page_height))
    axes = figure.subplots(rows, columns, squeeze=False, subplot_kw=dict(xticks=[], yticks=[]), gridspec_kw=frame)
    title = textwrap.fill(cut_middle(sheet.title, 160), int(page_width / 0.085))
    for text, size, top, room in ((cut_middle(sheet.prediction or "", 60), 18, 0.1, 0.35), (title, 11, 0.5, 0.4)):
        drawn = figure.text(0.5, 1 - top / page_height, text, fontsize=size, ha="center", va="top", parse_math=False)
        fit_text(drawn, page_width - 0.2, room)
    for axis in axes.flat[len(sheet.maps) :]:
        axis.set_axis_off()
    for axis, (name, values) in zip(axes.flat, sheet.maps.items()):
        axis.imshow(overlay(picture, values, sheet.padded).numpy(), extent=(0, 1, 1, 0), aspect=height / width)
        if columns > 1:
            fit_text(axis.set_title(name, fontsize=9, pad=3), w, above - 0.05)
        for color, line in (("white", 3), ("black", 1)) if sheet.box else ():  # seen on every background
            left, top, *sides = sheet.box
            axis.add_patch(Rectangle((left, top), *sides, fill=False, edgecolor=color, linewidth=line))
    if has_scale:
        place = (0.5 - 1 / page_width, 0.35 / page_height, 2 / page_width, 0.1 / page_height)
        bar = figure.colorbar(ScalarMappable(cmap=COLORMAP), figure.add_axes(place), orientation="horizontal")
        bar.set_ticks([0, 1], labels=["0", "largest"], fontsize=10)
    return figure


def overlay(picture: Tensor, values: Tensor, padded: tuple[float, float] = (1.0, 1.0)) -> Tensor:
    """Lays a smooth map over a picture, (H, W, 3) in [0, 1]; values of 0 leave it as it is.

    `values` are (h, w) from 0, coloured by COLORMAP, or (h, w, 3) colours in [0, 1]; `padded` is as in `Sheet`.
    """
    values = values.detach().cpu().float()
    layers = values[None] if values.dim() == 2 else values.permute(2, 0, 1)
    (H, W, _), (down, right) = picture.shape, padded
    smooth = F.interpolate(layers[None], (round(H * down), round(W * right)), mode="bicubic")[0, :, :H, :W].clamp_min(0)
    if values.dim() == 3:
        colors, opacity = smooth.clamp_max(1).permute(1, 2, 0), OPACITY
    else:
        share = smooth[0] / smooth.max().clamp_min(torch.finfo(smooth.dtype).tiny)
        colors = torch.from_numpy(COLORMAP(share.numpy())[..., :3].astype(np.float32))
        opacity = OPACITY * share[..., None]
    return picture + opacity * (colors - picture)
