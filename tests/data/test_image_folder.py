"""Image folders are listed in order, and refused clearly."""

import os
import re

import numpy as np
import pytest
from PIL import features

from vilonghorn.data import ImageFolder, create_loader, write_beton
from vilonghorn.data.image_file import UnreadableImage, read_image
from vilonghorn.data.image_folder import match_classes


def test_classes_and_samples_are_sorted_and_labels_count_the_classes(folder):
    images = ImageFolder(folder)
    assert images.classes == ["cat", "dog", "eel"]
    assert images.paths == sorted(images.paths)
    assert np.bincount(images.labels).tolist() == [8, 9, 10]
    image, label = images[8]
    assert image.mode == "RGB" and label == 1


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda path: path.symlink_to(path.name), "there is no such file"),
        (lambda path: path.symlink_to("gone.png"), "there is no such file"),
        (lambda path: path.mkdir(), "it is not a regular file"),
        (lambda path: os.mkfifo(path), "it is not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "it is not a regular file"),
    ],
    ids=["link to itself", "dangling link", "folder", "named pipe", "device"],
)
def test_what_is_no_file_is_named_when_it_is_read(tmp_path, photo, make, message):
    (tmp_path / "a").mkdir()
    photo(0).save(tmp_path / "a" / "0.png")
    make(tmp_path / "a" / "x.png")
    images = ImageFolder(tmp_path)
    assert images.classes == ["a"] and len(images) == 2 - (tmp_path / "a" / "x.png").is_dir()
    with pytest.raises(UnreadableImage, match=f"a/x.png: {message}$"):
        read_image(tmp_path / "a/x.png")


@pytest.mark.parametrize(
    ("files", "folder", "error", "message"),
    [
        ([], "nowhere", FileNotFoundError, "nowhere: no such folder"),
        (["x.txt"], "x.txt", NotADirectoryError, "x.txt: not a folder"),
        (["x.png"], ".", ValueError, "no class folders"),
        (["full/x.png", "hollow/.hidden"], ".", ValueError, "no image in class folder hollow"),
        (["train/a/x.png", "val/a/x.png"], ".", ValueError, r"folders are splits \(train, val\), not classes"),
        (["all/x.png", "Train/x.png", "test/x.png"], ".", ValueError, r"are splits \(Train, all, test\), not classes"),
        (["dev/a/x.png", "train/a/x.png"], ".", ValueError, r"folders are splits \(dev, train\), not classes"),
    ],
)
def test_a_folder_without_images_of_classes_is_refused(tmp_path, files, folder, error, message):
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_bytes(b"")
    with pytest.raises(error, match=message):
        ImageFolder(tmp_path / folder)


def test_control_characters_of_a_name_are_escaped_in_messages(tmp_path):
    (tmp_path / "a\x1b[31m").mkdir()
    with pytest.raises(ValueError, match=r"no image in class folder a\\x1b\[31m;"):
        ImageFolder(tmp_path)
    (tmp_path / "a\x1b[31m" / "\x1b[2J.png").write_bytes(b"")
    with pytest.raises(UnreadableImage) as error:
        ImageFolder(tmp_path)[0]
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    ("name", "format"),
    [("a.gif", "GIF"), ("a.JPE", "JPEG"), ("a.jfif", "JPEG"), ("A.WebP", "WEBP"), ("a.pnm", "PPM"), ("a.avif", "AVIF")],
)
def test_every_extension_of_a_format_that_pillow_reads_is_taken(tmp_path, photo, name, format):
    if format == "AVIF" and not features.check("avif"):
        pytest.skip("this Pillow reads no AVIF")
    (tmp_path / "a").mkdir()
    photo(0).save(tmp_path / "a" / name, format)
    image = ImageFolder(tmp_path)[0][0]
    assert np.abs(np.asarray(image).astype(int) - np.asarray(photo(0))).mean() < 12


def test_files_that_are_left_out_are_counted_and_those_of_systems_are_not(tmp_path, photo):
    for name in ("a/x.png", "a/deep/y.HEIC", "a/z.heic", "a/README", "b/x.jpg", "c.png", "b/notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        photo(0).save(tmp_path / name, "PNG")
    for name in ("@eaDir/x.png", "__MACOSX/a/._x.png", "a/@eaDir/x.png", "a/Thumbs.db", "b/.x.png", "b/desktop.ini"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        photo(0).save(tmp_path / name, "PNG")
    images = ImageFolder(tmp_path)
    assert images.classes == ["a", "b"] and len(images) == 2
    kinds = "2 .heic, 1 without extension, 1 .txt, 1 beside the class folders (c.png)"
    assert images.notes == [f"{tmp_path}: 5 of 7 files are left out: {kinds}"]
    with pytest.warns(UserWarning, match="5 of 7 files are left out: 2 .heic"):
        create_loader(tmp_path, training=True, batch_size=1)
    with pytest.warns(UserWarning, match="5 of 7 files are left out: 2 .heic"):
        write_beton(tmp_path, tmp_path / "x.beton", progress=False)


def test_a_link_to_a_folder_above_ends(tmp_path, photo):
    (tmp_path / "a" / "b").mkdir(parents=True)
    photo(0).save(tmp_path / "a" / "b" / "x.png")
    (tmp_path / "a" / "b" / "up").symlink_to("..")
    assert len(ImageFolder(tmp_path)) == 1


@pytest.mark.parametrize(
    ("link", "target", "message"),
    [
        ("data/a/more", "..", "data/a/more is a link to .*/data, a folder above it"),
        ("data/a/more", "../../..", "data/a/more is a link to .*, a folder above it"),
        ("data/a/deep/more", "/", "data/a/deep/more is a link to /, a folder above it"),
        ("data/a/more", "../b", "data/b is the same folder as .*/data/a, or one in it"),
        ("data/a/more", "../b/deep", "data/b/deep is the same folder as .*/data/a, or one in it"),
        ("data/c", "b", "data/c is the same folder as .*/data/b, or one in it"),
        ("data/c", "b/deep", "data/c is the same folder as .*/data/b, or one in it"),
    ],
)
def test_a_link_that_reaches_into_another_class_is_refused(tmp_path, photo, link, target, message):
    for name in ("a/deep", "b/deep"):
        (tmp_path / "data" / name).mkdir(parents=True)
        photo(0).save(tmp_path / "data" / name / "x.png")
    (tmp_path / "outside").mkdir()
    (tmp_path / "data" / "a" / "outside").symlink_to(tmp_path / "outside")  # is allowed
    assert len(ImageFolder(tmp_path / "data")) == 2
    (tmp_path / link).symlink_to(target)
    with pytest.raises(ValueError, match=f"{message}.*; .*remove the link|{message}.*: .*; remove the link"):
        ImageFolder(tmp_path / "data")


NFC, NFD = "caf\u00e9", "cafe\u0301"


@pytest.mark.parametrize("other", [NFD, "\uff43af\u00e9", "caf\u00e9 ", "ca\u200bf\u00e9"])
def test_class_names_that_look_equal_are_refused_and_unicode_forms_match(tmp_path, photo, other):
    for name in (NFC, other, "b"):
        (tmp_path / name).mkdir()
        photo(0).save(tmp_path / name / "x.png")
    with pytest.raises(ValueError, match="the class names '.*' and '.*' look equal; merge or rename them") as raised:
        ImageFolder(tmp_path)
    assert ascii(NFC) in str(raised.value) and ascii(other) in str(raised.value)
    if other == NFD:
        assert match_classes("x", ["b", NFD], ["a", "b", NFC]).tolist() == [1, 2]
    else:
        with pytest.raises(ValueError, match=r"there is no class .* looks like 'caf\\xe9'"):
            match_classes("x", [other], ["b", NFC])


def test_classes_are_in_the_order_of_their_names_as_strings(tmp_path, photo):
    names = ["1", "10", "2", "B", "Z", "a", "b", "é"]
    for name in reversed(names):
        (tmp_path / name).mkdir()
        photo(0).save(tmp_path / name / "x.png")
    assert ImageFolder(tmp_path).classes == names


@pytest.mark.parametrize(
    ("files", "note"),
    [
        (["only/x.png"], "has one class only, only$"),
        (
            ["2024/cat/x.png", "2024/dog/x.png"],
            "has one class only, 2024 and its class folders have folders only; give .*2024 if",
        ),
        (["\x1b[31m/cat/x.png", "\x1b[31m/dog/x.png"], r"folders only; give .*\\x1b\[31m if the classes are"),
        (["cat/1/x.png", "dog/1/x.png"], "its class folders have folders only; expected images in them"),
    ],
)
def test_folders_of_a_doubtful_level_are_noted(tmp_path, files, note):
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).touch()
    [found] = ImageFolder(tmp_path).notes
    assert re.search(note, found)
