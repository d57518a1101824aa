"""Scenes of digits: boxes are those of the ink, nothing overlaps, and no held-out digit is trained on."""

import pytest
import torch


@pytest.fixture
def scenes(script):
    return script("examples/scenes")


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
        assert (scene.semantic()[~scene.masks.any(0)] == 0).all()


def test_scenes_are_reproducible_and_show_no_held_out_digit_in_training(scenes):
    first, again = scenes.DigitScenes(10)[7], scenes.DigitScenes(8)[7]
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    train, test = ({digit.tobytes() for digit in scenes.DigitScenes(1, train=part).digits} for part in (True, False))
    assert (len(train), len(test)) == (1442, 355) and not train & test
