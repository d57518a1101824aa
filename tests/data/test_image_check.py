"""All images are opened once; what was found is remembered until a file changes."""

import os
from io import BytesIO

import numpy as np
import pytest

from vilonghorn.data import ImageFolder, image_check
from vilonghorn.data.image_check import ImageCheck, cache_folder


@pytest.fixture
def opened(monkeypatch):
    """The names of the images that are opened."""
    names, read = [], image_check.read_image
    monkeypatch.setattr(
        image_check, "read_image", lambda path, *rest: (names.append(os.path.basename(path)), read(path, *rest))
    )
    return names


@pytest.fixture
def photos(tmp_path, photo):
    """Two classes of two photographs, one of which is cut off, and of a dangling link."""
    for name in ("a", "b"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(2):
            photo(i + (name == "b")).save(tmp_path / "photos" / name / f"{name}{i} ü.png")
    cut = tmp_path / "photos" / "b" / "b1 ü.png"
    cut.write_bytes(cut.read_bytes()[:200])
    (tmp_path / "photos" / "b" / "gone.png").symlink_to("nowhere")
    return tmp_path / "photos"


def check(folder):
    found = ImageCheck(ImageFolder(folder))
    found.open()
    return found


def test_every_problem_is_found_and_equal_files_have_equal_digests(photos):
    found = check(photos)
    assert [bool(problem) for problem in found.problems] == [False, False, False, True, True]
    assert found.problems[3].startswith("not a readable image") and found.problems[4] == "there is no such file"
    assert np.array_equal(found.digests[1], found.digests[2]) and len(np.unique(found.digests, axis=0)) == 3


def test_a_file_is_opened_again_only_if_it_changes(photos, photo, opened):
    first = check(photos)
    assert sorted(opened) == ["a0 ü.png", "a1 ü.png", "b0 ü.png", "b1 ü.png", "gone.png"]
    opened.clear()
    second = check(photos)
    assert sorted(opened) == ["b1 ü.png", "gone.png"] and list(second.problems) == list(first.problems)
    assert np.array_equal(second.digests, first.digests)
    status = os.stat(photos / "a" / "a0 ü.png")
    photo(7).save(photos / "a" / "new.png")
    os.replace(photos / "a" / "new.png", photos / "a" / "a0 ü.png")
    os.utime(photos / "a" / "a0 ü.png", ns=(status.st_atime_ns, status.st_mtime_ns))  # as cp -p does
    (photos / "b" / "b1 ü.png").unlink()
    photo(8).save(photos / "b" / "b1 ü.png")
    opened.clear()
    third = check(photos)
    assert sorted(opened) == ["a0 ü.png", "b1 ü.png", "gone.png"]
    assert list(third.problems) == ["", "", "", "", "there is no such file"]
    assert not np.array_equal(third.digests[0], first.digests[0])


def test_a_file_that_came_and_went_is_not_remembered(photos, photo):
    found = ImageCheck(ImageFolder(photos))
    photo(9).save(photos / "b" / "nowhere", "PNG")  # after its size and times were asked for
    found.open()
    (photos / "b" / "nowhere").unlink()
    assert found.problems[4] == "" and check(photos).problems[4] == "there is no such file"


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "other", "encrypted", "array"])
def test_a_damaged_cache_is_said_and_not_believed(photos, opened, damage):
    first = check(photos)
    [file] = [path for path in cache_folder().iterdir() if path == first._file]
    data = bytearray(file.read_bytes())
    at = data.index(first.digests[0].tobytes())
    data[at] ^= 1
    encrypted, array = bytearray(file.read_bytes()), BytesIO()
    encrypted[encrypted.index(b"PK\x01\x02") + 8] ^= 1
    np.save(array, np.zeros(3))
    contents = {"flip": data, "cut": data[:at], "empty": b"", "other": b"PK\x03\x04" + data[:9]}
    contents |= {"encrypted": encrypted, "array": array.getvalue()}
    file.write_bytes(contents[damage])
    opened.clear()
    with pytest.warns(UserWarning, match="is damaged, so that all images are opened again"):
        second = check(photos)
    assert len(opened) == 5 and np.array_equal(second.digests, first.digests)


def test_a_cache_that_cannot_be_written_is_said(photos, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    for place in ("file", "n" * 300):  # a folder of another user is refused as a name that is too long
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / place))
        with pytest.warns(UserWarning, match="cannot be written, so that all images are opened again"):
            check(photos)


@pytest.mark.parametrize("variables", [{}, {"XDG_CACHE_HOME": "cache"}])
def test_without_a_home_nothing_is_kept_in_the_current_folder(photos, monkeypatch, tmp_path, variables, opened):
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user without an entry in /etc/passwd
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for _ in range(2):
        with pytest.warns(UserWarning, match="so that all images are opened again: .* set XDG_CACHE_HOME"):
            check(photos)
    assert len(opened) == 10 and not os.listdir()


def test_what_was_found_before_an_interruption_is_kept(photos, monkeypatch, opened):
    read = image_check.read_image

    def interrupt(path, *rest):
        if path.endswith("b0 ü.png"):
            raise KeyboardInterrupt
        return read(path, *rest)

    monkeypatch.setattr(image_check, "read_image", interrupt)
    monkeypatch.setattr(image_check, "available_cpus", lambda: 1)
    with pytest.raises(KeyboardInterrupt):
        check(photos)
    monkeypatch.setattr(image_check, "read_image", read)
    opened.clear()
    check(photos)
    assert {"a0 ü.png", "a1 ü.png"}.isdisjoint(opened)


def test_processes_open_a_part_each(photos, opened):
    for rank, expected in enumerate([["a0 ü.png", "b0 ü.png", "gone.png"], ["a1 ü.png", "b1 ü.png"]]):
        opened.clear()
        found = ImageCheck(ImageFolder(photos))
        found.problems[:] = None  # process 0 has written the cache
        found.open(rank, 2)
        assert sorted(opened) == expected and [p is not None for p in found.problems[rank::2]] == [True] * len(expected)


def test_a_split_is_by_class_and_content_and_keeps_copies_together(photos):
    folder = ImageFolder(photos)
    rng = np.random.default_rng(0)
    folder.paths = [f"{photos}/{name}/{i}.png" for name in "ab" for i in range(40)]
    folder.labels = np.repeat([0, 1], 40)
    folder.digests = rng.integers(0, 256, (80, 16)).astype(np.uint8)
    folder.digests[50] = folder.digests[3]
    train, val = folder.split(0.2, seed=1)
    assert sorted(train.paths + val.paths) == sorted(folder.paths)
    assert all(abs(np.bincount(val.labels)[label] - 8) <= 1 for label in (0, 1))
    assert (folder.paths[3] in val.paths) == (folder.paths[50] in val.paths)
    order = rng.permutation(80)
    moved = folder.select(order)
    moved.paths = [f"{path}.other" for path in moved.paths]
    assert {*moved.split(0.2, seed=1)[1].paths} == {f"{path}.other" for path in val.paths}
    assert {*folder.split(0.2, seed=2)[1].paths} != {*val.paths}
    one = folder.select(np.array([0, 41, 42]))
    folder.digests[40:] = folder.digests[0]  # all of a class are copies of one image of another
    assert {*folder.split(0.9)[0].labels.tolist()} == {0, 1}
    assert [len(part.paths) for part in one.split(0.01)] == [2, 1]  # of two images one is held out, of one none
