"""The digits are scikit-learn's, split the same way every time, and written whole or not at all."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from vilonghorn.data import ImageFolder
from vilonghorn.data.digits import main, write_digits

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


def test_a_second_call_finds_it_complete_and_writes_nothing(digits, capsys):
    before = (digits / "val" / "3").stat().st_mtime_ns
    assert not write_digits(digits)
    assert main(["digits", str(digits)]) == 0
    assert "already complete, nothing written" in capsys.readouterr().out
    assert (digits / "val" / "3").stat().st_mtime_ns == before


def test_anything_else_under_the_name_is_left_alone(tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    assert main(["digits", str(tmp_path / "mine")]) == 1
    assert "mine: exists and is not the whole set of digits" in capsys.readouterr().err
    assert [p.name for p in tmp_path.rglob("*")] == ["mine", "notes.txt"]


def test_a_missing_parent_folder_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="gone: no such folder"):
        write_digits(tmp_path / "gone" / "digits")


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
