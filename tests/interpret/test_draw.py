"""Sheets of maps and their figures: the right numbers, texts that have room, a photograph that is recognised."""

from dataclasses import replace
from types import SimpleNamespace

import matplotlib
import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from drawn_text import drawn_texts, misplaced
from left_run import leave_run, make_image
from matplotlib.cbook import get_sample_data
from PIL import Image

from vilonghorn import load
from vilonghorn.interpret.draw import KINDS, Sheet, draw, make_sheet, overlay, view
from vilonghorn.interpret.maps import attention, grad_cam, pca, receptive_field, to_map


@pytest.fixture
def run(tmp_path):
    """A run's model and an image (3, 16, 16) of 4 x 4 patches."""
    leave_run(tmp_path / "run", depth=3)
    return load(tmp_path / "run"), make_image(tmp_path / "a.png", 1)[0]


def test_a_padded_image_has_maps_of_its_whole_patches():
    model = timm.create_model("vilonghornv2_nano", num_classes=3, dynamic_img_pad=True).eval()
    loaded, image = SimpleNamespace(model=model, device="cpu", class_name=str), torch.randn(3, 40, 33)
    sheet = make_sheet(loaded, image, "field", blocks=[5], patch=(2, 2))
    field = F.pad(receptive_field(model, image[None], 5, 8), (0, 15, 0, 8))
    torch.testing.assert_close(sheet.maps["block 5"], F.avg_pool2d(field, 16)[0].sqrt())
    assert sheet.padded == (48 / 40, 48 / 33) and sheet.box == pytest.approx((32 / 33, 32 / 40, 16 / 33, 16 / 40))
    corner, picture = torch.zeros(3, 3, 3), torch.zeros(80, 66, 3)
    corner[2, 2] = 1
    changed = overlay(picture, corner, sheet.padded).amax(2)
    assert changed[:60, :50].max() < 0.2 < changed[-1, -1]  # the last patch begins at 64, 64


@pytest.mark.parametrize(
    "kind, names, grid",
    [("attention", ["blocks 2 to 3"], (4, 4)), ("field", ["block 5"], (2, 2)), ("cam", ["block 5"], (2, 2))],
)
def test_a_hierarchy_has_the_maps_of_its_stages(kind, names, grid):
    model = timm.create_model("vilonghornv2_nano", num_classes=3).eval()
    loaded = SimpleNamespace(model=model, device="cpu", class_name=str)
    sheet = make_sheet(loaded, torch.randn(3, 32, 32), kind)
    assert list(sheet.maps) == names and all(values.shape == grid for values in sheet.maps.values())
    assert draw(sheet, torch.rand(32, 32, 3)) and (sheet.box is None) == (kind != "field")


def test_attention_of_a_hierarchy_without_a_recurrence_is_an_error():
    loaded = SimpleNamespace(model=timm.create_model("vilonghornv2_nano", num_conv_stages=3), device="cpu")
    with pytest.raises(ValueError, match="no block of the model scans, so there is no attention to draw"):
        make_sheet(loaded, torch.randn(3, 32, 32), "attention")


def test_a_sheet_has_one_map_or_that_of_each_block(run):
    loaded, image = run
    model, images = loaded.model, image[None]
    rows = to_map(attention(model, images, [0, 1, 2])[:, :, 0, 0].mean(1), (4, 4))
    shares = rows / rows.sum((1, 2), keepdim=True)
    sheet = make_sheet(loaded, image, "attention")
    assert list(sheet.maps) == ["all blocks"] and "the class token reads" in sheet.title
    torch.testing.assert_close(sheet.maps["all blocks"], shares.mean(0))
    sheet = make_sheet(loaded, image, "attention", blocks=[2, -3])
    torch.testing.assert_close(sheet.maps, {"block 2": shares[2], "block 0": shares[0]})
    sheet = make_sheet(loaded, image, "attention", patch=(1, 3))
    assert sheet.box == (0.75, 0.25, 0.25, 0.25) and "patch 1,3 reads" in sheet.title

    sheet = make_sheet(loaded, image, "field")
    pixels = receptive_field(model, images, 2, 11).view(4, 4, 4, 4)
    torch.testing.assert_close(sheet.maps["block 2"], pixels.mean((1, 3)).sqrt())
    assert sheet.box == (0.5, 0.5, 0.25, 0.25)
    assert torch.equal(make_sheet(loaded, image, "pca").maps["block 2"], pca(model, images, 2)[0])
    sheet = make_sheet(loaded, image, "cam", target=4)
    assert sheet.title == "Grad-CAM: patches that raise the score of eel"
    assert torch.equal(sheet.maps["block 1"], grad_cam(model, images, [4], 1)[0])
    probability, best = (value.item() for value in model(images).softmax(1)[0].max(0))
    best = loaded.class_names[best]
    assert make_sheet(loaded, image, "cam").title.endswith(f"the score of {best}")
    assert {make_sheet(loaded, image, kind).prediction for kind in KINDS} == {f"{best}: {probability:.0%}"}


@pytest.mark.parametrize("pool, classes", [("avg", 6), ("max", 6), ("", 6), ("avg", 0)])
def test_where_the_head_reads_patches_their_average_attends(run, pool, classes):
    loaded, image = run
    loaded.model.reset_classifier(classes, pool)
    sheet = make_sheet(loaded, image, "attention", blocks=[1])
    expected = to_map(attention(loaded.model, image[None], [1], None)[0, :, 0, 0].mean(0), (4, 4))
    torch.testing.assert_close(sheet.maps["block 1"], expected / expected.sum())
    assert "the average of the patches reads" in sheet.title
    assert (sheet.prediction is None) == (classes == 0 or pool == "")
    if sheet.prediction:
        assert list(make_sheet(loaded, image, "cam").maps) == ["block 2"]


@pytest.mark.parametrize(
    "num_maps, size, font, name",
    [  # fonts that come with matplotlib; the widest letter, a name in one word, one that is no formula
        (1, (32, 32), "DejaVu Sans", "W" * 200),
        (1, (32, 2), "STIXGeneral", "tabby cat"),
        (1, (2, 32), "DejaVu Sans Mono", "n02123045_tabby_cat" * 4),
        (2, (32, 8), "DejaVu Sans", "$a_{ " * 20),
        (4, (8, 32), "DejaVu Serif", "tabby, tabby cat " * 9),
        (6, (24, 32), "DejaVu Sans", "tabby cat"),
    ],
)
def test_no_text_overlaps_another_or_leaves_the_figure(num_maps, size, font, name, monkeypatch):
    monkeypatch.setitem(matplotlib.rcParams, "font.family", [font])
    maps = {f"block {23 - i}": torch.rand(8, 8) for i in range(num_maps)}
    title = f"Grad-CAM: patches that raise the score of {name}"
    figure = draw(Sheet(title, maps, (0, 0, 0.5, 0.5), f"{name}: 87%"), torch.rand(*size, 3))
    assert misplaced(figure) == []
    texts = [text for text, _ in drawn_texts(figure)]
    assert ({*maps} if num_maps > 1 else set()) <= set(texts) and any("87%" in text for text in texts)


@pytest.mark.parametrize("size", [(16, 16), (90, 40)])
def test_the_view_is_the_models_input_with_more_pixels(run, size):
    loaded = replace(run[0], preprocessing={**run[0].preprocessing, "crop_pct": 0.8})
    picture = Image.fromarray((photograph().numpy() * 255).astype(np.uint8)).resize(size)
    seen, expected = view(loaded, picture), loaded.denormalize(loaded.transform(picture))
    assert max(seen.shape[:2]) > 500
    small = F.interpolate(seen.permute(2, 0, 1)[None], (16, 16), mode="area")[0].permute(1, 2, 0)
    assert np.corrcoef(small.flatten(), expected.flatten())[0, 1] > 0.94


def photograph():
    with get_sample_data("grace_hopper.jpg") as file:
        return torch.from_numpy(np.asarray(Image.open(file).convert("RGB").resize((224, 224))) / 255).float()


@pytest.mark.parametrize("values", [torch.rand(14, 14) ** 2, torch.rand(14, 14, 3)])
def test_the_photograph_is_recognised_under_every_map(values):
    picture = photograph()
    difference = overlay(picture, values) - overlay(torch.full_like(picture, 0.5), values)
    for channel in range(3):  # its colours, too
        assert np.corrcoef(picture[..., channel].flatten(), difference[..., channel].flatten())[0, 1] > 0.7


def test_a_map_is_smooth_and_its_largest_value_stands_out_on_black_and_on_white():
    values = torch.zeros(4, 4)
    assert torch.equal(overlay(photograph(), values), photograph())
    values[1, 2] = 3.0
    for gray in (0.0, 1.0):
        picture = torch.full((64, 64, 3), gray)
        change = (overlay(picture, values) - picture).norm(dim=-1)
        row, column = divmod(int(change.argmax()), 64)
        assert 16 <= row < 32 and 32 <= column < 48 and change.max() > 0.4
        assert (change[:, 1:] - change[:, :-1]).abs().max() < 0.2
