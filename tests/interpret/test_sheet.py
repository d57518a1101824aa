"""Sheets of maps and their figures: the right numbers in the right cells."""

import numpy as np
import pytest
import torch
from left_run import leave_run, make_image
from PIL import Image

from vilonghorn import load
from vilonghorn.interpret.draw import KINDS, Row, Sheet, draw, make_sheet
from vilonghorn.interpret.model import attention, grad_cam, memory, pca, receptive_field, to_map

GRID = (4, 4)


@pytest.fixture
def run(tmp_path):
    """A run's directory, and its loaded with an image (3, 16, 16)."""
    leave_run(tmp_path / "run", depth=3)
    image = make_image(tmp_path / "a.png", 1)[0]
    return tmp_path / "run", load(tmp_path / "run"), image


def test_a_sheet_has_the_maps_of_each_block_and_direction(run):
    _, loaded, image = run
    model, images = loaded.model, image[None]
    sheet = make_sheet(loaded, image, "attention", blocks=[2, -3], patch=(1, 3))
    maps = to_map(attention(model, images, [2, 0], [8])[:, :, 0, 0], GRID)
    assert sheet.blocks == [2, 0] and [row.label for row in sheet.rows] == ["forward", "backward", "both"]
    assert all(torch.equal(torch.stack(row.maps), maps[:, g]) for g, row in enumerate(sheet.rows[:2]))
    assert torch.equal(torch.stack(sheet.rows[2].maps), maps.mean(1))
    assert sheet.box == (12, 4, 4, 4) and "patch 1,3" in sheet.title

    lives, shares = (to_map(numbers[:, :, 0], GRID) for numbers in memory(model, images, [0, 1, 2]))
    sheet = make_sheet(loaded, image, "memory")
    assert sheet.blocks == [0, 1, 2] and sheet.box is None
    for row, expected in zip(sheet.rows, (lives[:, 0], lives[:, 1], shares.sum(1))):
        assert torch.equal(torch.stack(row.maps), expected)

    sheet = make_sheet(loaded, image, "field")
    assert torch.equal(sheet.rows[0].maps[1], receptive_field(model, images, 1, 11)[0].sqrt())
    assert sheet.box == (8, 8, 4, 4)
    assert torch.equal(make_sheet(loaded, image, "pca").rows[0].maps[2], pca(model, images, 2)[0])
    sheet = make_sheet(loaded, image, "cam", target=4)
    assert sheet.blocks == [0, 1] and sheet.title.startswith("Grad-CAM of class eel:")
    assert torch.equal(sheet.rows[0].maps[1], grad_cam(model, images, [4], 1)[0])
    probability, best = (value.item() for value in model(images).softmax(1)[0].max(0))
    best = loaded.class_names[best]
    assert make_sheet(loaded, image, "cam").title.startswith(f"Grad-CAM of class {best}:")
    assert {make_sheet(loaded, image, kind).prediction for kind in KINDS} == {f"Prediction: {best} {probability:.0%}"}
    model.reset_classifier(0)
    assert make_sheet(loaded, image, "pca").prediction is None


def test_a_model_that_scores_each_token_has_maps_without_a_prediction():
    loaded = load("vilonghorn_nano", "random", dict(global_pool="", img_size=32, num_classes=5, depth=2))
    assert make_sheet(loaded, torch.randn(3, 32, 32), "attention").prediction is None


def test_deep_models_show_blocks_at_even_distances():
    loaded = load("vilonghorn_nano", "random", dict(img_size=16, patch_size=8, depth=24, embed_dim=16))
    assert make_sheet(loaded, torch.zeros(3, 16, 16), "field").blocks == [0, 5, 9, 14, 18, 23]


def test_a_figure_shows_each_map_in_its_cell(run):
    _, loaded, image = run
    infinite = torch.tensor([[1.0, 2.0], [3.0, torch.inf]])
    own, shared, colours = [torch.rand(4, 4), infinite[:1]], [infinite, infinite * 2], [torch.rand(2, 2, 3)] * 2
    rows = [Row("a", own), Row("b", shared, "tokens"), Row("c", colours)]
    figure = draw(Sheet("t", [3, 7], rows, (4, 8, 4, 4)), loaded.denormalize(image))
    cells, image_axes = np.array(figure.axes[:6]).reshape(3, 2), figure.axes[6]
    pixels = np.asarray(Image.open(run[0].parent / "a.png")) / 255
    assert np.allclose(image_axes.images[0].get_array(), pixels, atol=1e-6)
    titles = [f"block 3\nmax {float(own[0].max()):.2g}", "block 7\nmax 2"]
    assert [axis.get_title() for axis in cells[0]] == titles
    assert [axis.get_title() for axis in cells[1]] == ["block 3", "block 7"]
    for row, line in zip(rows, cells):
        assert line[0].get_ylabel() == row.label
        for values, axis in zip(row.maps, line):
            assert np.allclose(axis.images[0].get_array(), 0.1 + 0.7 * pixels.mean(-1), atol=1e-6)
            shown = axis.images[-1].get_array()
            known = values.isfinite().numpy()
            assert np.array_equal(shown[known], values.numpy()[known])
            assert (shown[~known] > axis.images[-1].norm.vmax).all()  # in the colour of what is beyond the scale
            assert axis.patches[0].get_bbox().bounds == (4, 8, 4, 4)
    assert cells[1, 0].images[-1].norm.vmax == cells[1, 1].images[-1].norm.vmax == 6
    bars = [child for line in cells for child in line[-1].child_axes]
    assert [bar.get_ylabel() for bar in bars] == ["of maximum", "tokens"]
    assert [bar.get_ylim() for bar in bars] == [(0, 1), (0, 6)]
