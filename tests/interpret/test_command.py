"""Sheets of maps and the command that draws them: the right numbers in the right cells, and what is refused."""

import errno
import os
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from left_run import leave_run, make_image
from PIL import Image

from vilonghorn.interpret.__main__ import main
from vilonghorn.interpret.draw import KINDS, Row, Sheet, draw, make_sheet
from vilonghorn.interpret.model import attention, grad_cam, memory, pca, receptive_field, to_map
from vilonghorn.tools.loaded_model import load_model

GRID = (4, 4)


@pytest.fixture
def run(tmp_path):
    """A run's directory, and its loaded with an image (3, 16, 16)."""
    leave_run(tmp_path / "run", depth=3)
    image = make_image(tmp_path / "a.png", 1)[0]
    return tmp_path / "run", load_model(str(tmp_path / "run")), image


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
    loaded = load_model("vilonghorn_nano", "random", dict(global_pool="", img_size=32, num_classes=5, depth=2))
    assert make_sheet(loaded, torch.randn(3, 32, 32), "attention").prediction is None


def test_a_class_is_named_by_its_name_or_number(run, tmp_path, capsys):
    command = [str(run[0]), str(tmp_path / "a.png"), "--what", "cam", "--out", str(tmp_path / "cam.png"), "--class"]
    for name in ("eel", "4"):
        assert main([*command, name]) == 0
        assert "Grad-CAM of class eel" in capsys.readouterr().out
    digits = replace(run[1], class_names=["1", "0"])
    assert [digits.class_index(name) for name in ("1", "0", "3")] == [0, 1, 3]  # a name comes before a number
    with pytest.raises(ValueError, match="no class 'cat'; the classes have numbers only"):
        replace(digits, class_names=None).class_index("cat")


def test_deep_models_show_blocks_at_even_distances():
    loaded = load_model("vilonghorn_nano", "random", dict(img_size=16, patch_size=8, depth=24, embed_dim=16))
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


@pytest.mark.parametrize("what", KINDS)
def test_the_command_writes_a_picture(run, tmp_path, what, capsys):
    out = tmp_path / f"{what}.png"
    assert main([str(run[0]), str(tmp_path / "a.png"), "--what", what, "--out", str(out), "--blocks", "0", "-2"]) == 0
    assert capsys.readouterr().out.startswith(f"{out}: ") and Image.open(out).size[0] > 500
    assert np.asarray(Image.open(out)).std() > 10  # not an empty page


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--out", "{tmp}/a.jpg"], "expected a name that ends in .png"),
        (["--out", "{tmp}/no/a.png"], "but there is no folder"),
        (["--blocks", "3"], "block is 3, expected -3 to 2"),
        (["--patch", "4,0"], "patch 4,0 is not on the image's grid of 4 rows and 4 columns"),
        (["--what", "cam", "--class", "6"], "expected one of 0 to 5"),
        (["--what", "cam", "--class", "eal"], "has no class 'eal'; the nearest known are eel"),
        (["--what", "cam", "--blocks", "-1"], "take an earlier block"),
        (["--what", "pca", "--patch", "1,1"], "--patch is for attention and field, not for --what pca"),
        (["--class", "6"], "--class is for cam, not for --what attention"),
        (["--checkpoint", "last"], "there are no weights"),
    ],
)
def test_what_cannot_be_drawn_gets_one_sentence_and_no_file(run, tmp_path, arguments, sentence, capsys):
    out = [] if "--out" in arguments else ["--out", str(tmp_path / "out.png")]
    before = set(tmp_path.rglob("*"))
    options = [argument.format(tmp=tmp_path) for argument in arguments]
    assert main([str(run[0]), str(tmp_path / "a.png"), *out, *options]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and sentence in lines[0]
    assert set(tmp_path.rglob("*")) == before


def test_a_full_disk_is_no_reason_to_resume_a_run(run, tmp_path, monkeypatch, capsys):
    def full(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr("vilonghorn.interpret.__main__.atomic_write", full)
    assert main([str(run[0]), str(tmp_path / "a.png"), "--out", str(tmp_path / "out.png")]) == 2
    err = capsys.readouterr().err
    assert "No space left on device" in err and "resume" not in err


def test_other_models_and_images_that_do_not_decode_are_refused(run, tmp_path, capsys):
    (tmp_path / "b.png").write_bytes(b"no image")
    out = ["--out", str(tmp_path / "out.png")]
    assert main([str(run[0]), str(tmp_path / "b.png"), *out]) == 2
    assert "b.png: not a readable image" in capsys.readouterr().err
    leave_run(tmp_path / "vit", "vit_tiny_patch16_224", num_heads=2)
    assert main([str(tmp_path / "vit"), str(tmp_path / "a.png"), *out]) == 2
    assert re.search(
        "VisionTransformer, expected a vilonghorn_., vilonghornv2_. or vim_. backbone", capsys.readouterr().err
    )
    with pytest.raises(SystemExit):
        main([str(run[0]), str(tmp_path / "a.png"), *out, "--patch", "3"])
    assert "'3' is not ROW,COLUMN" in capsys.readouterr().err
    assert not (tmp_path / "out.png").exists()
