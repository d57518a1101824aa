"""Image folders are listed in order and refused clearly; every kind of image becomes the right RGB."""

import os
import struct
import zlib

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image

from vilonghorn.data import ImageFolder
from vilonghorn.data.images import UnreadableImage, read_header, read_image


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
    (tmp_path / "a" / ".thumbnails").mkdir()
    photo(0).save(tmp_path / "a" / ".thumbnails" / "x.png")
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


@pytest.mark.parametrize("name", ["x.png", "folder", "notes.txt"])
def test_a_link_to_itself_is_no_folder_and_as_an_image_is_named_when_it_is_read(tmp_path, photo, name):
    (tmp_path / "a").mkdir()
    photo(0).save(tmp_path / "a" / "0.png")
    (tmp_path / "a" / name).symlink_to(name)
    images = ImageFolder(tmp_path)
    assert images.classes == ["a"] and len(images) == (2 if name == "x.png" else 1)
    if name == "x.png":
        with pytest.raises(UnreadableImage, match="x.png: not a readable image"):
            images[1]


@pytest.mark.skipif(os.name != "posix", reason="names of files are Unicode here")
def test_a_class_folder_whose_name_is_not_utf8_is_named(tmp_path):
    os.makedirs(os.fsencode(tmp_path) + b"/caf\xe9")
    with pytest.raises(ValueError, match=r"the name of class folder 'caf\\udce9' is not UTF-8; rename") as error:
        ImageFolder(tmp_path)
    assert str(error.value).isascii()


def test_control_characters_of_a_name_are_escaped_in_messages(tmp_path):
    (tmp_path / "a\x1b[31m").mkdir()
    with pytest.raises(ValueError, match=r"no image in class folder a\\x1b\[31m;"):
        ImageFolder(tmp_path)
    (tmp_path / "a\x1b[31m" / "\x1b[2J.png").write_bytes(b"")
    with pytest.raises(UnreadableImage) as error:
        ImageFolder(tmp_path)[0]
    assert str(error.value).isprintable()


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


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"


@pytest.mark.parametrize("name", ["x.jpg", "x.png", "x.eps"])
def test_ghostscript_is_never_run(tmp_path, monkeypatch, name):
    runs = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *a, **k: runs.append(a))
    (tmp_path / name).write_bytes(EPS)
    for read in (read_header, read_image):
        with pytest.raises(UnreadableImage, match=f"{name}: not a readable image .its content is none of JPEG, PNG, "):
            read(str(tmp_path / name))
    assert not runs


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [9500, 20000])  # PIL would warn of the first and refuse the second
def test_an_image_that_would_fill_the_memory_is_refused_with_the_option_that_admits_it(tmp_path, photo, side):
    photo(0).save(tmp_path / "x.png")
    data = (tmp_path / "x.png").read_bytes()
    header = b"IHDR" + struct.pack(">II", side, side) + data[24:29]
    (tmp_path / "x.png").write_bytes(data[:12] + header + struct.pack(">I", zlib.crc32(header)) + data[33:])
    for read in (read_header, read_image):
        with pytest.raises(UnreadableImage, match="x.png: .*pixels.*; shrink it or.*raise max_pixels .--max-pixels"):
            read(str(tmp_path / "x.png"))


def test_the_limit_of_pixels_can_be_raised_even_above_that_of_pil(tmp_path, photo, monkeypatch):
    (tmp_path / "a").mkdir()
    photo(0, 20, 30).save(tmp_path / "a" / "x.png")
    with pytest.raises(UnreadableImage, match="x.png: 20x30 pixels are more than the limit of 599 pixels"):
        ImageFolder(tmp_path, max_pixels=599)[0]
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert ImageFolder(tmp_path, max_pixels=600)[0][0].size == (20, 30)


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


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_pixels_of_32_bits_are_refused_as_their_range_is_unknown(tmp_path, dtype):
    Image.fromarray(np.full((4, 5), 200, dtype)).save(tmp_path / "x.tif")
    with pytest.raises(UnreadableImage, match="x.tif: .*32-bit .* of unknown range; convert it to 8 bits"):
        read_image(str(tmp_path / "x.tif"))


TRANSPARENT = {  # a dark row above a row that is transparent
    "RGBA": Image.fromarray(np.uint8([[[40, 50, 60, 255]] * 2, [[40, 50, 60, 0]] * 2])),
    "LA": Image.fromarray(np.uint8([[[40, 255]] * 2, [[40, 0]] * 2])),
    "L": Image.fromarray(np.uint8([[40, 40], [41, 41]])),
    "I;16": Image.fromarray(np.uint16([[40 << 8] * 2, [41 << 8] * 2])),
    "P": Image.fromarray(np.uint8([[40, 40], [41, 41]])).convert("P"),
    "RGB": Image.fromarray(np.uint8([[[40, 50, 60]] * 2, [[41, 50, 60]] * 2])),
}


@pytest.mark.parametrize("mode", TRANSPARENT)
def test_transparent_pixels_become_white(tmp_path, mode):
    key = {"L": 41, "I;16": 41 << 8, "P": 41, "RGB": (41, 50, 60)}
    TRANSPARENT[mode].save(tmp_path / "x.png", **({"transparency": key[mode]} if mode in key else {}))
    pixels = np.asarray(read_image(str(tmp_path / "x.png")))
    assert (pixels[1] == 255).all() and (pixels[0] < 100).all()
    assert "transparent pixels" in read_header(str(tmp_path / "x.png"))[2]


def test_half_transparent_pixels_are_blended_with_white(tmp_path):
    Image.new("RGBA", (2, 2), (0, 0, 0, 128)).save(tmp_path / "x.png")
    assert np.asarray(read_image(str(tmp_path / "x.png"))).tolist() == np.full((2, 2, 3), 127).tolist()


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
