"""The digits are scikit-learn's, split the same way every time, and written whole or not at all."""

import numpy as np
import pytest
from PIL import Image

from vilonghorn.data.digits import write_digits

datasets = pytest.importorskip("sklearn.datasets", reason="the digits come with scikit-learn")


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    target = tmp_path_factory.mktemp("embedded") / "new" / "digits"
    assert write_digits(target)
    return target


def test_the_pictures_are_those_of_scikit_learn_and_every_fifth_is_held_out(digits):
    source, order = datasets.load_digits(), []
    for label in range(10):
        for position, index in enumerate(np.flatnonzero(source.target == label)):
            order.append(digits / ("val" if position % 5 == 4 else "train") / str(label) / f"{index:04d}.png")
    assert sorted(order) == sorted(digits.glob("*/*/*.png")) and len(list(digits.glob("val/*/*"))) == 355
    image = Image.open(digits / "train" / "0" / "0000.png")
    assert image.size == (32, 32)
    small = np.asarray(image.resize((8, 8), Image.Resampling.BOX)).ravel()
    similarity = [np.corrcoef(small, digit.ravel())[0, 1] for digit in source.images]
    assert np.argmax(similarity) == 0 and similarity[0] > 0.98


def test_a_failure_on_the_way_leaves_nothing(tmp_path, monkeypatch):
    def save(image, path):
        if path.name == "0100.png":
            raise OSError("disk full")

    monkeypatch.setattr(Image.Image, "save", save)
    with pytest.raises(OSError, match="disk full"):
        write_digits(tmp_path / "digits")
    assert list(tmp_path.iterdir()) == []
