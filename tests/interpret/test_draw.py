"""Figures of maps: every text has its room, and the photograph is recognised under its map."""

import matplotlib
import numpy as np
import pytest
import torch
from drawn_text import drawn_texts, misplaced
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cbook import get_sample_data
from matplotlib.figure import Figure
from PIL import Image

from vilonghorn.interpret.draw import EXPLANATIONS, KINDS, Row, Sheet, draw


def a_sheet(num_blocks, name="tabby cat", size=(8, 8), power=1.0):
    """Random maps with the longest labels of `make_sheet`, one of them infinite, and blocks with two digits."""
    generator = torch.Generator().manual_seed(0)
    maps = [[torch.rand(size, generator=generator) ** power for _ in range(num_blocks)] for _ in range(3)]
    maps[0][0][0, 0] = torch.inf
    components = [torch.rand(*size, 3, generator=generator) for _ in range(num_blocks)]
    rows = [
        Row("backward:\nhalf-life", [200 * values for values in maps[0]], "tokens"),
        Row("left at the\nclass token", maps[1], "share"),
        Row("backward", [1e-4 * values for values in maps[2]]),
        Row("components", components),
    ]
    title = f"Grad-CAM of class {name}: patches that raise its score"
    return Sheet(title, [23 - i for i in range(num_blocks)], rows, (0, 0, 4, 4), f"Prediction: {name} 87%")


@pytest.mark.parametrize(
    "num_blocks, columns, size, font, name",
    [  # fonts that come with matplotlib; the widest letter, a name in one word, one that is no formula
        (1, None, (32, 32), "DejaVu Sans", "W" * 200),
        (1, None, (32, 2), "STIXGeneral", "tabby cat"),
        (2, None, (2, 32), "DejaVu Sans Mono", "n02123045_tabby_cat" * 4),
        (2, 1, (32, 8), "DejaVu Sans", "$a_{ " * 20),
        (3, 2, (32, 32), "DejaVu Sans Mono", "W" * 200),
        (4, 2, (8, 32), "DejaVu Serif", "tabby, tabby cat " * 9),
        (6, None, (32, 8), "DejaVu Sans Mono", "W" * 200),
        (6, None, (24, 32), "DejaVu Sans", "tabby cat"),
    ],
)
def test_no_text_overlaps_another_or_leaves_the_figure(num_blocks, columns, size, font, name, monkeypatch):
    monkeypatch.setitem(matplotlib.rcParams, "font.family", [font])
    figure = draw(a_sheet(num_blocks, name), torch.rand(*size, 3), columns)
    assert misplaced(figure) == []
    texts = [text for text, _ in drawn_texts(figure)]
    assert {"block 23", f"block {24 - num_blocks}", "tokens", "share", "of maximum"} <= set(texts)
    heading = "".join("".join(text for text in texts if text.startswith("Pre")).split())
    assert heading.endswith("87%") and heading.startswith(f"Prediction:{name[:3]}")


def test_overlapping_and_cut_texts_are_found():
    figure = Figure(figsize=(2, 2))
    for x, text in ((0.1, "a word"), (0.15, "another"), (0.95, "cut off")):
        figure.text(x, 0.5 if text != "cut off" else 0.1, text)
    assert misplaced(figure) == [("cut off",), ("a word", "another")]


def cells(figure):
    """The pixels of each axes with an image, as drawn, in gray, (h, w)."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    gray = np.asarray(canvas.buffer_rgba())[..., :3].mean(-1)
    boxes = [axis.get_window_extent().extents.round().astype(int) for axis in figure.axes if axis.images]
    return [gray[len(gray) - y1 + 2 : len(gray) - y0 - 2, x0 + 2 : x1 - 2] for x0, y0, x1, y1 in boxes]


def test_the_photograph_is_recognised_under_every_map():
    with get_sample_data("grace_hopper.jpg") as file:
        photograph = Image.open(file).convert("RGB").resize((224, 224))
    picture = torch.from_numpy(np.asarray(photograph) / 255).float()
    found = cells(draw(a_sheet(3, size=(14, 14), power=2), picture))
    flat = cells(draw(a_sheet(3, size=(14, 14), power=2), torch.full_like(picture, 0.5)))
    assert len(found) == len(flat) == 13
    reference = np.asarray(photograph.convert("L").resize((150, 150)), dtype=float).ravel()
    for cell, without in zip(found, flat):
        difference = np.asarray(Image.fromarray(cell - without).resize((150, 150))).ravel()
        assert np.corrcoef(reference, difference)[0, 1] > 0.7


def test_colours_tell_the_values_of_a_map_apart_on_black_and_on_white():
    values = torch.linspace(0, 1, 8).expand(2, 8)
    picture = torch.cat([torch.zeros(8, 32, 3), torch.ones(8, 32, 3)])
    figure = draw(Sheet("t", [0], [Row("a", [values], "share")]), picture)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[..., :3].astype(float)
    x0, y0, x1, y1 = figure.axes[0].get_window_extent().extents
    for row in (0.25, 0.75):
        y = int(len(pixels) - y1 + row * (y1 - y0))
        colours = pixels[y, [int(x0 + (i + 0.5) / 8 * (x1 - x0)) for i in range(8)]]
        assert np.ptp(colours[0]) == 0  # the gray of the image
        assert (np.linalg.norm(np.diff(colours, axis=0), axis=1) > 10).all()
        assert np.ptp(colours[-1]) > 100


def test_every_kind_is_explained():
    assert list(EXPLANATIONS) == list(KINDS)
    assert all(text.endswith(".") and len(text.split()) < 50 for text in EXPLANATIONS.values())
