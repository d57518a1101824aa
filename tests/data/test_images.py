"""Image folders are listed in order and refused clearly; every kind of image becomes the right RGB."""

from __future__ import annotations

import os

import numpy as np
import pytest
from PIL import Image

from vilonghorn.data import ImageFolder
from vilonghorn.data.images import UnreadableImage, read_image


def test_classes_and_samples_are_sorted_and_labels_count_the_classes(folder):
    images = ImageFolder(folder)
    assert images.classes == ["cat", "dog", "eel"]
    assert images.paths == sorted(images.paths)
    assert np.bincount(images.labels).tolist() == [8, 9, 10]
    image, label = images[8]
    assert image.mode == "RGB" and label == 1


def test_nested_images_count_and_hidden_and_foreign_files_do_not(tmp_path, photo):
    (tmp_path / "a" / "deep").mkdir(parents=True)
    (tmp_path / ".cache").mkdir()
    photo(0).save(tmp_path / "a" / "deep" / "x.PNG")
    photo(0).save(tmp_path / ".cache" / "y.png")
    (tmp_path / "a" / "notes.txt").write_text("no image")
    images = ImageFolder(tmp_path)
    assert images.classes == ["a"] and len(images) == 1


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_only_regular_files_and_links_to_them_are_images(folder, tmp_path):
    (tmp_path / "a").mkdir()
    os.mkfifo(tmp_path / "a" / "pipe.png")
    (tmp_path / "a" / "linked-pipe.png").symlink_to(tmp_path / "a" / "pipe.png")
    (tmp_path / "a" / "linked.png").symlink_to(folder / "cat" / "00.png")
    assert ImageFolder(tmp_path).paths == [str(tmp_path / "a" / "linked.png")]


def test_a_dangling_link_is_named_and_not_passed_over(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.png").symlink_to(tmp_path / "gone.png")
    with pytest.raises(ValueError, match="x.png: not a readable image"):
        ImageFolder(tmp_path)[0]


def test_a_file_that_is_not_there_is_not_called_unreadable(tmp_path):
    with pytest.raises(UnreadableImage, match="gone.png: there is no such file$"):
        read_image(str(tmp_path / "gone.png"))


def test_links_that_lead_back_add_no_image_and_no_class(tmp_path, photo):
    root = tmp_path / "root"
    for name in ("a/deep", "b"):
        (root / name).mkdir(parents=True)
        photo(0).save(root / name / "x.png")
    (root / "loop").symlink_to(root)
    for number, target in enumerate((".", "..", "../..", "deep")):
        (root / "a" / f"loop{number}").symlink_to(target)
    (root / "a" / "deep" / "loop").symlink_to("..")
    images = ImageFolder(root)
    assert images.classes == ["a", "b"]
    assert images.paths == [str(root / "a" / "deep" / "x.png"), str(root / "b" / "x.png")]


def test_a_linked_folder_of_images_counts_once(folder, tmp_path):
    (tmp_path / "a").mkdir()
    for name in ("first", "second"):
        (tmp_path / "a" / name).symlink_to(folder / "cat")
    images = ImageFolder(tmp_path)
    assert len(images) == 8 and images.paths[0] == str(tmp_path / "a" / "first" / "00.png")


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere: no such folder"):
        ImageFolder(tmp_path / "nowhere")


def test_a_file_is_refused(tmp_path):
    (tmp_path / "x.txt").write_text("")
    with pytest.raises(NotADirectoryError, match="x.txt: not a folder"):
        ImageFolder(tmp_path / "x.txt")


def test_an_empty_folder_and_one_without_class_folders_are_refused(tmp_path, photo):
    with pytest.raises(ValueError, match="no class folders"):
        ImageFolder(tmp_path)
    photo(0).save(tmp_path / "x.png")
    with pytest.raises(ValueError, match="no class folders"):
        ImageFolder(tmp_path)


def test_a_class_folder_without_images_is_named(tmp_path, photo):
    (tmp_path / "full").mkdir()
    photo(0).save(tmp_path / "full" / "x.png")
    (tmp_path / "hollow").mkdir()
    with pytest.raises(ValueError, match="no image in class folder hollow"):
        ImageFolder(tmp_path)


def test_a_folder_of_splits_is_not_taken_for_classes(tmp_path, photo):
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        photo(0).save(tmp_path / split / "a" / "x.png")
    with pytest.raises(ValueError, match="holds splits .train, val., not classes"):
        ImageFolder(tmp_path)


@pytest.mark.parametrize("mode", ["L", "LA", "P", "1", "RGBA", "CMYK", "YCbCr"])
def test_a_gray_patch_is_the_same_rgb_from_every_mode(tmp_path, mode):
    level = 255 if mode == "1" else 153  # both are in PIL's default palette
    image = Image.new("RGB", (5, 4), (level,) * 3).convert(mode)
    path = str(tmp_path / ("x.tif" if mode in ("CMYK", "YCbCr") else "x.png"))
    image.save(path)
    found = read_image(path)
    assert found.mode == "RGB" and found.size == (5, 4)
    assert np.abs(np.asarray(found).astype(int) - level).max() <= 2


def test_sixteen_bit_gray_is_scaled_and_not_clipped(tmp_path):
    Image.fromarray(np.full((4, 5), 0x8000, np.uint16)).save(tmp_path / "x.png")
    assert np.asarray(read_image(str(tmp_path / "x.png"))).tolist() == np.full((4, 5, 3), 0x80).tolist()


def test_exif_rotation_is_applied(tmp_path):
    image = Image.new("RGB", (20, 10))
    exif = image.getexif()
    exif[0x0112] = 6  # turn by 90 degrees to see it upright
    image.save(tmp_path / "x.jpg", exif=exif)
    assert read_image(str(tmp_path / "x.jpg")).size == (10, 20)


def test_an_image_of_one_pixel_is_named(tmp_path):
    Image.new("RGB", (1, 1)).save(tmp_path / "dot.png")
    with pytest.raises(ValueError, match="dot.png: not a readable image .1x1 pixels; each side must have at least 2"):
        read_image(str(tmp_path / "dot.png"))


@pytest.mark.parametrize("keep", [0, 10, 0.5])
def test_a_truncated_image_is_named(tmp_path, photo, keep):
    photo(0).save(tmp_path / "whole.jpg")
    data = (tmp_path / "whole.jpg").read_bytes()
    (tmp_path / "part.jpg").write_bytes(data[: int(keep * len(data)) if keep == 0.5 else keep])
    with pytest.raises(ValueError, match="part.jpg: not a readable image"):
        read_image(str(tmp_path / "part.jpg"))
