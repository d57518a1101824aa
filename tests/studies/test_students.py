"""Views of drawings are as wanted, and those that resemble a test image are left out."""

import numpy as np
import pytest
import torch
from numpy.random import default_rng
from PIL import Image

pytest.importorskip("sklearn")


@pytest.fixture
def students(script):
    return script("studies/students")


@pytest.fixture
def views(students):
    return pytest.importorskip("views")  # studies/students puts its folder on the path


@pytest.mark.parametrize("size", [(40, 160), (160, 40), (3, 3)])
def test_a_view_shows_a_drawing_on_white_or_another_ground(views, size):
    drawing = Image.new("RGBA", size, (255, 0, 0, 255))
    ground = Image.new("RGB", (300, 200), (0, 0, 255))
    rng, whites = default_rng(0), 0
    for _ in range(40):
        view = views.view(drawing, [ground], rng)
        assert view.size == (views.SIDE, views.SIDE) and view.mode == "RGB"
        pixels = np.asarray(view).reshape(-1, 3)
        assert (pixels == (255, 0, 0)).all(1).any()
        whites += (pixels == 255).all(1).any()
    assert 10 <= whites <= 30  # half of the views, less those that a square fills


def test_a_part_of_a_photograph_lies_inside(views):
    photograph = Image.new("RGB", (301, 203), "white")
    assert {np.asarray(views.part(photograph, default_rng(i))).min() for i in range(20)} == {255}


def test_views_that_resemble_a_test_image_are_left_out(students):
    targets = default_rng(0).random((30, 1280)).astype(np.float16)
    tests = targets[[4, 17]] + np.float16(0.05)
    assert students.unlike(targets, tests).tolist() == [i for i in range(30) if i not in (4, 17)]


def test_the_student_learns_features_from_the_views_at_the_index(students, monkeypatch):
    monkeypatch.setattr(students, "EPOCHS", 3)
    monkeypatch.setattr(students, "BATCH", 4)
    rng, seen = default_rng(0), set()
    views = np.broadcast_to(np.arange(12, dtype=np.uint8)[:, None, None, None], (12, 128, 128, 3))
    batch_of = students.batch_of
    monkeypatch.setattr(students, "batch_of", lambda batch: seen.update(batch[:, 0, 0, 0].tolist()) or batch_of(batch))
    model = students.train(views, rng.random((12, 6)).astype(np.float16), np.arange(2, 10))
    assert seen == set(range(2, 10))
    start = students.timm.create_model("vilonghornv2_nano.icons480", pretrained=True, num_classes=0)
    assert not model.training and model(torch.zeros(1, 3, 64, 64)).shape == (1, 160)
    assert model.state_dict().keys() == start.state_dict().keys()
    assert not torch.equal(model.stem.conv1.weight, start.stem.conv1.weight)
