"""The digits are scikit-learn's, split the same way every time, and written whole or not at all."""

import numpy as np
import pytest
from PIL import Image

from vilonghorn.data import ImageFolder
from vilonghorn.data.digits import SPLITS, load_split, write_digits

datasets = pytest.importorskip("sklearn.datasets", reason="the digits come with scikit-learn")


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    target = tmp_path_factory.mktemp("embedded") / "digits"
    assert write_digits(target)
    return target


def test_every_digit_is_in_one_split_under_its_label(digits):
    train, val = ImageFolder(digits / "train"), ImageFolder(digits / "val")
    assert train.classes == val.classes == [str(i) for i in range(10)]
    assert len(train) == 1442 and len(val) == 355
    labels = datasets.load_digits().target
    seen = [int(path[-8:-4]) for path in train.paths + val.paths]
    assert sorted(seen) == list(range(1797))
    assert (labels[seen] == np.concatenate([train.labels, val.labels])).all()


def test_the_split_holds_out_every_fifth_of_each_digit(digits):
    labels = datasets.load_digits().target
    for digit in range(10):
        positions = np.flatnonzero(labels == digit)
        held_out = sorted(int(path.stem) for path in (digits / "val" / str(digit)).iterdir())
        assert held_out == positions[4::5].tolist()


def test_the_pictures_are_those_of_scikit_learn_at_32_pixels(digits):
    path = digits / "train" / "0" / "0000.png"
    image = Image.open(path)
    assert image.size == (32, 32)
    small = np.asarray(image.resize((8, 8), Image.Resampling.BOX)).ravel()
    similarity = [np.corrcoef(small, digit.ravel())[0, 1] for digit in datasets.load_digits().images]
    assert np.argmax(similarity) == 0 and similarity[0] > 0.98


def test_a_second_call_finds_it_complete_and_writes_nothing(digits):
    before = (digits / "val" / "3").stat().st_mtime_ns
    assert not write_digits(digits)
    assert (digits / "val" / "3").stat().st_mtime_ns == before


def test_anything_else_under_the_name_is_left_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="mine: exists and is not the complete set of digits"):
        write_digits(tmp_path / "mine")
    assert [p.name for p in tmp_path.rglob("*")] == ["mine", "notes.txt"]


def test_missing_parent_folders_are_made(tmp_path):
    assert write_digits(tmp_path / "new" / "data" / "digits")


def test_a_failure_on_the_way_leaves_nothing(tmp_path, monkeypatch):
    saved = []

    def save(image, path):
        saved.append(path)
        if len(saved) == 100:
            raise OSError("disk full")

    monkeypatch.setattr(Image.Image, "save", save)
    with pytest.raises(OSError, match="disk full"):
        write_digits(tmp_path / "digits")
    assert list(tmp_path.iterdir()) == []


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
