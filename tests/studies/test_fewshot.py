"""Mosaics of icons: the label is the digit of the asked class, and no class of the test is in training."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from fewshot import SIDE, WAYS, Tokens, digit_tiles, nearest, read_icons
from numpy.random import default_rng
from PIL import Image
from study.tasks import list_icons

pytest.importorskip("sklearn", reason="the values are the digits that come with scikit-learn")


@pytest.fixture
def icons():
    """Twelve classes of six icons, whose pixels are 100 + the class but for the first, their number in the class."""
    labels = np.repeat(np.arange(12), 6)
    icons = np.full((72, SIDE, SIDE), 100, np.uint8) + labels.astype(np.uint8)[:, None, None]
    icons[:, 0, 0] = np.tile(np.arange(6), 12)
    return icons, labels


@pytest.fixture
def tokens(icons):
    """Tokens that are the tiles themselves."""
    return Tokens(lambda tiles: torch.from_numpy(tiles).flatten(1).float(), icons, "val")


@pytest.mark.parametrize("grid, shots", [(4, 1), (8, 5)])
def test_the_label_is_the_digit_beside_the_icons_of_the_asked_class(tokens, grid, shots):
    images, values = digit_tiles("val")
    half = len(images) // 2
    white = {image.tobytes(): int(value) for image, value in zip(images[:half], values)}
    dark = {image.tobytes() for image in images[half:]}
    inputs, labels = tokens.batch(default_rng(1), 40, grid, shots)
    assert inputs.shape == (40, grid**2, SIDE**2) and len(set(labels.tolist())) > 5
    for sequence, label in zip(inputs.numpy().astype(np.uint8), labels.tolist()):
        found: dict[int, list] = {}
        for icon, digit in zip(sequence[:-1:2], sequence[1:-1:2]):
            if digit.tobytes() in white:
                found.setdefault(icon[1] - 100, []).append((icon[0], white[digit.tobytes()]))
            else:
                assert {icon.tobytes(), digit.tobytes()} <= dark
        assert len(found) == WAYS
        assert all(len(pairs) == len({number for number, _ in pairs}) == shots for pairs in found.values())
        digits = [{value for _, value in pairs} for pairs in found.values()]
        assert all(len(values) == 1 for values in digits) and len(set.union(*digits)) == WAYS
        asked = found[sequence[-1][1] - 100]
        assert {value for _, value in asked} == {label} and sequence[-1][0] not in [number for number, _ in asked]


def test_the_nearest_icon_is_found_where_tokens_tell_the_class(icons):
    assert nearest(Tokens(lambda tiles: torch.eye(256)[tiles[:, 1, 1].tolist()], icons, "val"), 20) == 100
    assert nearest(Tokens(lambda tiles: torch.ones(len(tiles), 1), icons, "val"), 100) < 60


def test_a_class_of_the_test_is_in_no_other_split_and_validation_has_other_authors(tmp_path):
    for split, prefix in (("train", "eve"), ("val", "ann"), ("val", "bob")):
        for label in range(12):
            folder = tmp_path / split / f"class{label:02}"
            folder.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (64, 64), (20 * label, 20 * label, 20 * label)).save(folder / f"{prefix}_icon.png")
    sets = {prefix: {"author": prefix} for prefix in ("eve", "ann", "bob")}
    (tmp_path / "manifest.json").write_text(json.dumps({"sets": sets}))
    list_icons.cache_clear()
    found = read_icons(tmp_path)
    kept = [label for label in range(12) if label not in (5, 11)]
    assert found["train"][1].tolist() == kept and found["val"][1].tolist() == sorted(2 * kept)
    assert found["test"][1].tolist() == [5] * 3 + [11] * 3
    for images, labels in found.values():
        assert images.shape[1:] == (SIDE, SIDE) and (images == 20 * labels[:, None, None]).all()
    list_icons.cache_clear()
