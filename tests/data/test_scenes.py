"""Scenes of digits: boxes are those of the ink, nothing overlaps, and no held-out digit is trained on."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from vilonghorn.data.digits import held_out
from vilonghorn.data.scenes import SIZES, DigitScenes


@pytest.mark.parametrize("train", [True, False])
def test_boxes_and_classes_are_those_of_the_masks(train):
    for scene in DigitScenes(30, side=96, train=train):
        assert 1 <= len(scene.labels) == len(scene.boxes) == len(scene.masks) <= 3
        assert scene.image.shape == (3, 96, 96) and 0 <= scene.image.min() and scene.image.max() <= 1
        assert scene.masks.sum(0).max() == 1  # ink of one digit alone
        for box, label, mask in zip(scene.boxes.long(), scene.labels, scene.masks):
            left, top, right, bottom = box.tolist()
            assert mask[top:bottom, left:right].sum() == mask.sum()
            for edge in (mask[top], mask[bottom - 1], mask[:, left], mask[:, right - 1]):
                assert edge.any()
            assert (scene.semantic()[mask] == 1 + label).all()
        assert (scene.semantic()[~scene.masks.any(0)] == 0).all()


def test_ink_is_brighter_than_what_is_around_it():
    for scene in DigitScenes(20):
        grey, ink = scene.image.mean(0), scene.masks.any(0)
        assert grey[ink].mean() > grey[~ink].mean() + 0.2


def test_a_scene_is_the_same_whenever_it_is_asked_for_and_others_differ():
    scenes = DigitScenes(10)
    first, again = scenes[7], DigitScenes(8)[7]
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    for other in (scenes[6], DigitScenes(10, seed=1)[7], DigitScenes(10, train=False)[7]):
        assert not torch.equal(first.image, other.image)


def test_training_scenes_show_no_held_out_digit():
    digits = load_digits()
    train, test = DigitScenes(1), DigitScenes(1, train=False)
    assert (len(train.labels), len(test.labels)) == (1442, 355)
    chosen = held_out(digits.target)
    assert np.array_equal(test.digits * 16, digits.images[chosen]) and np.array_equal(
        train.labels, digits.target[~chosen]
    )


def test_every_digit_of_a_class_is_drawn_as_one_of_that_class():
    labels = {int(label) for scene in DigitScenes(100) for label in scene.labels}
    assert labels == set(range(10))


def test_what_is_not_there_is_refused():
    with pytest.raises(ValueError, match=f"side is 40, expected at least {SIZES[1]} pixels"):
        DigitScenes(1, side=40)
    with pytest.raises(IndexError, match="scene 5 of 5"):
        DigitScenes(5)[5]
