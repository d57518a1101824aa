"""Scenes of digits: boxes are those of the ink, nothing overlaps, and no held-out digit is trained on."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from vilonghorn.data.digits import every_fifth


@pytest.fixture
def scenes(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "docs" / "examples"))
    return importlib.import_module("scenes")


@pytest.mark.parametrize("train", [True, False])
def test_boxes_and_classes_are_those_of_the_masks(scenes, train):
    for scene in scenes.DigitScenes(30, side=96, train=train):
        assert 1 <= len(scene.labels) == len(scene.boxes) == len(scene.masks) <= 3
        assert scene.image.shape == (3, 96, 96) and 0 <= scene.image.min() and scene.image.max() <= 1
        assert scene.masks.sum(0).max() == 1  # ink of one digit alone
        for box, label, mask in zip(scene.boxes.long(), scene.labels, scene.masks):
            left, top, right, bottom = box.tolist()
            assert mask[top:bottom, left:right].sum() == mask.sum()
            for edge in (mask[top], mask[bottom - 1], mask[:, left], mask[:, right - 1]):
                assert edge.any()
            assert (scene.semantic()[mask] == 1 + label).all()
        grey, ink = scene.image.mean(0), scene.masks.any(0)
        assert (scene.semantic()[~ink] == 0).all()
        assert grey[ink].mean() > grey[~ink].mean() + 0.2


def test_a_scene_is_reproducible_and_others_differ(scenes):
    first, again = scenes.DigitScenes(10)[7], scenes.DigitScenes(8)[7]
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    for other in (
        scenes.DigitScenes(10)[6],
        scenes.DigitScenes(10, seed=1)[7],
        scenes.DigitScenes(10, train=False)[7],
    ):
        assert not torch.equal(first.image, other.image)


def test_training_scenes_show_no_held_out_digit(scenes):
    digits = load_digits()
    train, test = scenes.DigitScenes(1), scenes.DigitScenes(1, train=False)
    assert (len(train.labels), len(test.labels)) == (1442, 355)
    chosen = every_fifth(digits.target, 4)
    assert np.array_equal(test.digits * 16, digits.images[chosen])
    assert np.array_equal(train.labels, digits.target[~chosen])
    assert {int(label) for scene in scenes.DigitScenes(100) for label in scene.labels} == set(range(10))


def test_a_side_or_an_index_out_of_range_is_refused(scenes):
    with pytest.raises(ValueError, match=f"side is 40, expected at least {scenes.SIZES[1]} pixels"):
        scenes.DigitScenes(1, side=40)
    with pytest.raises(IndexError, match="scene 5 of 5"):
        scenes.DigitScenes(5)[5]
