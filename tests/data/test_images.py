"""Image folders are listed in order and refused clearly; every kind of image becomes the right RGB."""

import os
import struct
import zlib

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image

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
    (tmp_path / "a" / ".thumbnails").mkdir()
    photo(0).save(tmp_path / "a" / ".thumbnails" / "x.png")
    photo(0).save(tmp_path / "a" / "deep" / "x.PNG")
    photo(0).save(tmp_path / ".cache" / "y.png")
    (tmp_path / "a" / "notes.txt").write_text("no image")
    images = ImageFolder(tmp_path)
    assert images.classes == ["a"] and len(images) == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.symlink_to(path.name),
        lambda path: path.symlink_to("gone.png"),
        lambda path: path.mkdir(),
        lambda path: getattr(os, "mkfifo", os.mkdir)(path),
    ],
    ids=["link to itself", "dangling link", "folder", "named pipe"],
)
def test_what_is_no_file_is_named_when_it_is_read(tmp_path, photo, make):
    (tmp_path / "a").mkdir()
    photo(0).save(tmp_path / "a" / "0.png")
    make(tmp_path / "a" / "x.png")
    images = ImageFolder(tmp_path)
    assert images.classes == ["a"] and len(images) == 2 - (tmp_path / "a" / "x.png").is_dir()
    for name in ("a/x.png", "gone.png"):
        with pytest.raises(UnreadableImage, match=f"{name}: there is no such file$"):
            read_image(str(tmp_path / name))


@pytest.mark.parametrize(
    ("files", "folder", "error", "message"),
    [
        ([], "nowhere", FileNotFoundError, "nowhere: no such folder"),
        (["x.txt"], "x.txt", NotADirectoryError, "x.txt: not a folder"),
        (["x.png"], ".", ValueError, "no class folders"),
        (["full/x.png", "hollow/.hidden"], ".", ValueError, "no image in class folder hollow"),
        (["train/a/x.png", "val/a/x.png"], ".", ValueError, r"folders are splits \(train, val\), not classes"),
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


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"


@pytest.mark.parametrize("name", ["x.jpg", "x.eps"])
def test_ghostscript_is_never_run(tmp_path, monkeypatch, name):
    runs = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *a, **k: runs.append(a))
    (tmp_path / name).write_bytes(EPS)
    with pytest.raises(UnreadableImage, match=f"{name}: not a readable image .its content is none of JPEG, PNG, "):
        read_image(str(tmp_path / name))
    assert not runs


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [9500, 20000])  # PIL would warn of the first and refuse the second
def test_an_image_that_would_fill_the_memory_is_refused_with_the_option_that_admits_it(tmp_path, photo, side):
    photo(0).save(tmp_path / "x.png")
    data = (tmp_path / "x.png").read_bytes()
    header = b"IHDR" + struct.pack(">II", side, side) + data[24:29]
    (tmp_path / "x.png").write_bytes(data[:12] + header + struct.pack(">I", zlib.crc32(header)) + data[33:])
    with pytest.raises(UnreadableImage, match="x.png: too many pixels.*; shrink it or.*raise max_pixels .--max-pixels"):
        read_image(str(tmp_path / "x.png"))


def test_the_limit_of_pixels_can_be_raised_even_above_that_of_pil(tmp_path, photo, monkeypatch):
    (tmp_path / "a").mkdir()
    photo(0, 20, 30).save(tmp_path / "a" / "x.png")
    with pytest.raises(UnreadableImage, match="x.png: too many pixels .20x30 are more than the limit of 599"):
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
    assert (pixels[1] == 255).all() and ((pixels[0] >= 40) & (pixels[0] <= 60)).all()


def test_a_truncated_image_and_one_of_one_pixel_are_named(tmp_path, photo):
    photo(0).save(tmp_path / "whole.jpg")
    data = (tmp_path / "whole.jpg").read_bytes()
    for size in (0, 10, len(data) // 2):
        (tmp_path / "part.jpg").write_bytes(data[:size])
        with pytest.raises(ValueError, match="part.jpg: not a readable image"):
            read_image(str(tmp_path / "part.jpg"))
    Image.new("RGB", (1, 1)).save(tmp_path / "dot.png")
    with pytest.raises(ValueError, match="dot.png: not a readable image .1x1 pixels; each side must have at least 2"):
        read_image(str(tmp_path / "dot.png"))


def test_exif_rotation_is_applied_and_half_transparent_pixels_are_blended_with_white(tmp_path):
    image = Image.new("RGB", (20, 10))
    exif = image.getexif()
    exif[0x0112] = 6  # turn by 90 degrees to see it upright
    image.save(tmp_path / "x.jpg", exif=exif)
    assert read_image(str(tmp_path / "x.jpg")).size == (10, 20)
    Image.new("RGBA", (2, 2), (0, 0, 0, 128)).save(tmp_path / "x.png")
    assert np.asarray(read_image(str(tmp_path / "x.png"))).tolist() == np.full((2, 2, 3), 127).tolist()
