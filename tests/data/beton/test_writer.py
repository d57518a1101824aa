"""What is written is what was given, whole or not at all, and the writer ends whatever its dataset does."""

import errno
import json
import os
import threading

import numpy as np
import pytest
from damage import decode
from PIL import Image

from vilonghorn.data import ImageFolder, check_beton, write_beton
from vilonghorn.data.beton.format import MODES


class Samples(list):
    """A map-style dataset out of a list, in which an exception stands for a sample that raises it."""

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        if isinstance(sample, Exception):
            raise sample
        return sample


def test_pixels_labels_and_class_names_come_back(folder, raw_beton, jpg_beton):
    images, raw, jpg = ImageFolder(folder), check_beton(raw_beton, images=True), check_beton(jpg_beton)
    assert raw.classes == images.classes and raw.num_classes == 3 and (raw.labels == images.labels).all()
    assert (jpg.images["mode"] == MODES["jpg"]).all()
    for index in (0, 8, 26):
        image = np.asarray(images[index][0])
        assert (decode(raw, index) == image).all()
        assert np.abs(decode(jpg, index).astype(int) - image).mean() < 3
    manifest = json.loads(raw_beton.with_name("raw.beton.json").read_text())
    assert manifest["samples"] == 27 and manifest["class_counts"] == [8, 9, 10]
    assert manifest["classes"] == ["cat", "dog", "eel"]
    assert manifest["settings"] == dict(mode="raw", max_resolution=500, jpeg_quality=90)


def test_the_bytes_do_not_depend_on_the_number_of_workers(folder, tmp_path):
    for workers in (1, 3):
        write_beton(folder, tmp_path / f"{workers}.beton", mode="jpg", workers=workers, progress=False)
    assert (tmp_path / "1.beton").read_bytes() == (tmp_path / "3.beton").read_bytes()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"mode": "smart"}, "mode 'smart': expected jpg or raw"),
        ({"max_resolution": 1}, "max_resolution 1: expected 2 to 16384"),
        ({"jpeg_quality": 101}, "jpeg_quality 101: expected 1 to 100"),
        ({"workers": 0}, "workers 0: expected 1 to"),
        ({"classes": ["a", "a"]}, r"give classes=\[...\], a distinct string"),
        ({"classes": [0, 1]}, r"classes is \[0, 1\], expected a list of names, by label"),
        ({"classes": "ab"}, "classes is 'ab', expected a list of names, by label"),
        ({"classes": {"a": 1, "b": 0}}, "classes is {'a': 1, 'b': 0}, expected a list"),
    ],
)
def test_an_option_that_cannot_be_used_is_refused_before_writing(tmp_path, photo, options, message):
    with pytest.raises(ValueError, match=message):
        write_beton([(photo(0, 8, 8), 0)], tmp_path / "x.beton", **options)
    assert not list(tmp_path.iterdir())


def test_no_image_straddles_a_page(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (1000, 1000, 3), dtype=np.uint8)
    beton = write_beton([(noise, i) for i in range(5)], tmp_path / "x.beton", max_resolution=1000)
    page = 8 << 20
    start = beton.images["data_ptr"].astype(np.int64)
    assert (start // page == (start + beton.sizes - 1) // page).all()
    assert (start[-1] // page) > (start[0] // page)
    assert (decode(beton, 4) == noise).all()


def test_large_images_shrink_to_max_resolution_and_small_ones_stay(tmp_path, photo):
    beton = write_beton([(photo(0, 90, 60), 0), (photo(0, 20, 30), 1)], tmp_path / "x.beton", max_resolution=45)
    assert beton.images[["width", "height"]].tolist() == [(45, 30), (20, 30)]


def test_arrays_gray_images_and_integer_likes_are_taken(tmp_path):
    gray = np.full((6, 7), 9, np.uint8)
    samples = [(gray, np.int32(0)), (gray[..., None], 1), (np.dstack([gray] * 3), 2), (Image.fromarray(gray), True)]
    beton = write_beton(samples, tmp_path / "x.beton", progress=False)
    assert beton.labels.tolist() == [0, 1, 2, 1] and beton.classes is None and beton.num_classes == 3
    assert all((decode(beton, i) == 9).all() for i in range(4))


@pytest.mark.parametrize(
    ("sample", "kind", "message"),
    [
        (RuntimeError("the disk of the dataset is gone"), RuntimeError, "is gone"),
        ((np.zeros((4, 4, 3), np.uint8), 0.5), TypeError, "sample 30: label 0.5 is a float"),
        ((np.zeros((4, 4, 3), np.uint8), -1), ValueError, "sample 30: label -1"),
        ((np.zeros((4, 4, 3), np.uint8), 2**24), ValueError, "sample 30: label 16777216; expected 0 to 16777215"),
        ((np.zeros((4, 4, 3), np.float32), 0), TypeError, r"sample 30: image is a float32 \(4, 4, 3\)"),
        ((np.zeros((1, 9, 3), np.uint8), 0), ValueError, "sample 30: 9x1 pixels"),
        (("x.png", 0), TypeError, "sample 30: image is a str"),
        ((np.zeros((3, 8, 8), np.uint8), 0), TypeError, r"sample 30: image is a uint8 \(3, 8, 8\)"),
        ({"image": None, "label": 0}, TypeError, "sample 30: it is a dict, expected a pair of image and label"),
    ],
)
def test_a_bad_sample_ends_the_writer_and_leaves_the_old_file(tmp_path, sample, kind, message):
    good = (np.zeros((4, 4, 3), np.uint8), 0)
    path = tmp_path / "x.beton"
    write_beton([good], path, progress=False)
    before = path.read_bytes(), sorted(tmp_path.iterdir()), threading.active_count()
    with pytest.raises(kind, match=message):
        write_beton(Samples([good] * 30 + [sample] + [good] * 30), path, overwrite=True, progress=False)
    assert (path.read_bytes(), sorted(tmp_path.iterdir()), threading.active_count()) == before


@pytest.mark.parametrize("workers", [1, 3])
def test_an_unreadable_image_is_named_and_left_out_if_that_is_asked_for(tmp_path, photo, workers):
    root, path = tmp_path / "source", tmp_path / "x.beton"
    for i, name in enumerate(("a/0.png", "a/1.png", "b/2.png")):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        photo(i).save(root / name)
    (root / "a" / "1.png").write_bytes(b"no picture")
    with pytest.raises(ValueError, match="1.png: not a readable image .*; --skip-unreadable .* leaves such images out"):
        write_beton(root, path, workers=workers, progress=False)
    assert not list(tmp_path.glob("x.beton*"))
    beton = write_beton(root, path, skip_unreadable=True, workers=workers, progress=False)
    assert beton.labels.tolist() == [0, 1] and beton.classes == ["a", "b"]
    manifest = json.loads((tmp_path / "x.beton.json").read_text())
    (left_out,) = manifest["left_out"]
    assert f"{root}/a/1.png: not a readable" in left_out and manifest["class_counts"] == [1, 1]
    assert (decode(beton, 1) == np.asarray(Image.open(root / "b" / "2.png"))).all()


def test_a_dataset_without_one_readable_image_is_refused(tmp_path):
    (tmp_path / "src" / "a").mkdir(parents=True)
    (tmp_path / "src" / "a" / "0.jpg").write_bytes(b"")
    with pytest.raises(ValueError, match="no image of the dataset can be read; the first error: .*0.jpg"):
        write_beton(tmp_path / "src", tmp_path / "x.beton", skip_unreadable=True, progress=False)
    with pytest.raises(ValueError, match="empty"):
        write_beton([], tmp_path / "x.beton")
    Image.new("RGB", (4000, 3)).save(tmp_path / "src" / "a" / "0.jpg")
    with pytest.raises(ValueError, match="0.jpg: 4000x3 pixels are stored as 500x0"):
        write_beton(tmp_path / "src", tmp_path / "x.beton", progress=False)
    assert not list(tmp_path.glob("x.beton*"))


def test_a_second_writer_of_a_file_is_refused_and_the_first_completes(tmp_path, photo):
    path, second = tmp_path / "x.beton", []

    class Greedy(Samples):  # a dataset that starts the second writer while the first reads it
        def __getitem__(self, index):
            with pytest.raises(FileExistsError, match="x.beton: is being written by another process; wait") as error:
                write_beton([(photo(1, 8, 8), 0)], path, overwrite=True, progress=False)
            second.append(error)
            return super().__getitem__(index)

    write_beton(Greedy([(photo(0, 9, 9), 0)]), path, workers=1, progress=False)
    assert len(second) == 1 and check_beton(path, images=True).images["width"].tolist() == [9]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["x.beton", "x.beton.json"]
    write_beton([(photo(1, 8, 8), 0)], path, overwrite=True, progress=False)


def test_a_disk_that_fills_up_on_the_way_is_named_and_leaves_nothing(tmp_path):
    full = Samples([OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))])
    with pytest.raises(OSError, match="no space left for .*x.beton: free some space, then write"):
        write_beton(full, tmp_path / "x.beton", progress=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("operation", ["fsync", "replace"])
def test_a_disk_that_fails_at_the_end_leaves_the_old_file_and_its_manifest(tmp_path, photo, monkeypatch, operation):
    path = tmp_path / "x.beton"
    write_beton([(photo(0, 8, 8), 0)], path, classes=["old"], progress=False)
    monkeypatch.setattr(os, operation, lambda *files: (_ for _ in ()).throw(OSError(errno.EIO, "input/output error")))
    with pytest.raises(OSError, match="input/output error: '.*x.beton'"):
        write_beton([(photo(1, 8, 8), 0)] * 2, path, classes=["new"], progress=False, overwrite=True)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["x.beton", "x.beton.json"]
    beton = check_beton(path, images=True)
    assert beton.classes == ["old"] and beton.num_samples == 1


def test_an_error_of_a_dataset_names_the_sample_and_not_the_new_file(tmp_path):
    with pytest.raises(OSError, match="input/output error: 'sample 0'"):
        write_beton(Samples([OSError(errno.EIO, "input/output error")]), tmp_path / "x.beton", progress=False)
