"""The digits are scikit-learn's, split the same way every time, and written whole or not at all."""

import numpy as np
import pytest
from PIL import Image

from vilonghorn.data.digits import SPLITS, load_split, write_digits

datasets = pytest.importorskip("sklearn.datasets", reason="the digits come with scikit-learn")


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    target = tmp_path_factory.mktemp("embedded") / "new" / "digits"
    assert write_digits(target)
    return target


def test_the_pictures_are_those_of_scikit_learn_at_32_pixels(digits):
    path = digits / "train" / "0" / "0000.png"
    image = Image.open(path)
    assert image.size == (32, 32)
    small = np.asarray(image.resize((8, 8), Image.Resampling.BOX)).ravel()
    similarity = [np.corrcoef(small, digit.ravel())[0, 1] for digit in datasets.load_digits().images]
    assert np.argmax(similarity) == 0 and similarity[0] > 0.98


def test_a_failure_on_the_way_leaves_nothing(tmp_path, monkeypatch):
    def save(image, path):
        if path.name == "0100.png":
            raise OSError("disk full")

    monkeypatch.setattr(Image.Image, "save", save)
    with pytest.raises(OSError, match="disk full"):
        write_digits(tmp_path / "digits")
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_left_alone(digits, tmp_path):
    before = (digits / "val" / "3").stat().st_mtime_ns
    assert not write_digits(digits)
    assert (digits / "val" / "3").stat().st_mtime_ns == before
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="exists and is not the complete set of digits"):
        write_digits(tmp_path)
    assert [p.name for p in tmp_path.rglob("*")] == ["notes.txt"]


def test_the_three_splits_share_no_digit_and_hold_what_was_written(digits):
    splits = [load_split(split) for split in SPLITS]
    assert [len(split.labels) for split in splits] == [1085, 357, 355]
    assert np.array_equal(np.sort(np.concatenate([split.indices for split in splits])), np.arange(1797))
    source = datasets.load_digits()
    for split, folder in zip(splits, ("train", "train", "val")):
        assert (split.labels == source.target[split.indices]).all()
        assert (split.images == np.rint(source.images[split.indices] * (255 / 16))).all()
        for label, positions in enumerate(split.by_label):
            assert np.array_equal(positions, np.flatnonzero(split.labels == label))
            assert all((digits / folder / str(label) / f"{split.indices[i]:04d}.png").exists() for i in positions)
    with pytest.raises(ValueError, match="split 'all': expected one of train, val, test"):
        load_split("all")
