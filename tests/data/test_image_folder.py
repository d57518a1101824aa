"""Image folders are listed in order and refused clearly; every kind of image becomes the right RGB."""

import errno
import os
import re
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, Image, features
from timm.data import create_transform

import vilonghorn
from vilonghorn.data import ImageFolder, create_loader, write_beton
from vilonghorn.data.image_folder import UnreadableImage, describe_crop, match_classes, read_image, to_rgb


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


@pytest.mark.parametrize("bits", [10, 12])
@pytest.mark.parametrize("kind", ["png", "tif", "rgb.png"])
def test_fewer_bits_that_are_stored_in_16_are_refused(tmp_path, bits, kind):
    levels = np.linspace(0, 2**bits - 1, 20).astype(np.uint16).reshape(4, 5)
    file = tmp_path / f"x.{kind}"
    if kind == "rgb.png":  # PIL does not write it
        rows = b"".join(b"\0" + np.repeat(row[:, None], 3, 1).astype(">u2").tobytes() for row in levels)
        parts = (b"IHDR" + struct.pack(">IIBBBBB", 5, 4, 16, 2, 0, 0, 0), b"IDAT" + zlib.compress(rows), b"IEND")
        chunks = (struct.pack(">I", len(part) - 4) + part + struct.pack(">I", zlib.crc32(part)) for part in parts)
        file.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))
    else:
        Image.fromarray(levels).save(file)
    with pytest.raises(UnreadableImage, match="16 bits, of which the highest four are 0; scale or"):
        read_image(file)
    Image.fromarray(levels << (16 - bits)).save(tmp_path / "full.png")
    assert np.asarray(read_image(tmp_path / "full.png")).max() == 255


def test_a_tiff_of_16_bits_with_white_at_zero_is_refused(tmp_path):
    Image.fromarray(np.full((4, 5), 40000, np.uint16)).save(tmp_path / "x.tif", tiffinfo={262: 0})
    with pytest.raises(UnreadableImage, match="white where they are 0"):
        read_image(tmp_path / "x.tif")


@pytest.mark.parametrize("kind, value", [(1, b"\6\0\0\0"), (2, b"6\0\0\0"), (7, b"\6\0\0\0"), (9, b"\6\0\0\0")])
def test_the_orientation_is_applied_whatever_its_type_in_exif(tmp_path, kind, value):
    exif = b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<HHHI", 1, 0x112, kind, 1) + value + bytes(4)
    Image.new("RGB", (4, 8)).save(tmp_path / "x.jpg", exif=exif)
    assert read_image(tmp_path / "x.jpg").size == (8, 4)


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


@pytest.mark.parametrize(("bits", "kind", "levels"), [(2, 0, [1]), (4, 0, [3]), (16, 2, [256, 700, 65280])])
def test_the_transparent_colour_of_a_png_has_the_bits_of_its_pixels(tmp_path, bits, kind, levels):
    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    pixel = "".join(f"{level:0{bits}b}" for level in levels)
    row = b"\0" + int(pixel * 8, 2).to_bytes(bits * len(levels), "big")  # eight pixels
    data = chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 2, bits, kind, 0, 0, 0))
    data += chunk(b"tRNS", struct.pack(f">{len(levels)}H", *levels)) + chunk(b"IDAT", zlib.compress(row * 2))
    (tmp_path / "x.png").write_bytes(b"\x89PNG\r\n\x1a\n" + data + chunk(b"IEND", b""))
    assert (np.asarray(read_image(tmp_path / "x.png")) == 255).all()


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


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp", ".tif"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_orientation_of_a_camera_is_applied_once(tmp_path, orientation, suffix):
    upright = Image.fromarray(np.uint8([[0, 80, 160], [40, 120, 255]])).resize((48, 32), Image.Resampling.NEAREST)
    turns = dict(zip(range(2, 9), (0, 3, 1, 5, 2, 6, 4)))  # what the camera did, the reverse of the remedy
    stored = upright.transpose(Image.Transpose(turns[orientation])) if orientation > 1 else upright
    exif = stored.getexif()
    exif[0x0112] = orientation
    stored.convert("RGB").save(tmp_path / f"x{suffix}", exif=exif, quality=100)
    once = read_image(tmp_path / f"x{suffix}")
    for image in (once, to_rgb(once), to_rgb(Image.open(tmp_path / f"x{suffix}"))):
        assert np.abs(np.asarray(image).astype(int) - np.asarray(upright)[..., None]).max() < 12


def test_damaged_exif_data_do_not_hide_an_image(tmp_path):
    image, random = Image.effect_noise((40, 30), 50), np.random.default_rng(0)
    exif = image.getexif()
    exif[0x0112], exif[0x010F] = 6, "camera"
    whole = exif.tobytes()
    for _ in range(400):
        damaged = bytearray(whole)
        for at in random.integers(8, len(whole), 3):
            damaged[at] = random.integers(256)
        image.save(tmp_path / "x.jpg", exif=bytes(damaged))
        assert sorted(read_image(tmp_path / "x.jpg").size) == [30, 40]


def test_half_transparent_pixels_are_blended_with_white(tmp_path):
    Image.new("RGBA", (2, 2), (0, 0, 0, 128)).save(tmp_path / "x.png")
    assert np.asarray(read_image(str(tmp_path / "x.png"))).tolist() == np.full((2, 2, 3), 127).tolist()


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


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), OSError(errno.EMFILE, "x"), MemoryError()])
def test_an_error_of_the_machine_is_not_one_of_the_image(tmp_path, photo, monkeypatch, error):
    (tmp_path / "a").mkdir()
    photo(0).save(tmp_path / "a" / "x.png")
    monkeypatch.setattr(Image.Image, "load", lambda image: (_ for _ in ()).throw(error))
    with pytest.raises(OSError, match=r"\[Errno \d+\] .*: '.*a/x.png'"):
        write_beton(tmp_path, tmp_path / "x.beton", skip_unreadable=True, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("mode", ["center", "squash", "border"])
@pytest.mark.parametrize("pct", [1.0, 0.8])
def test_the_share_of_an_image_that_a_crop_shows_is_that_of_timms_transform(mode, pct):
    picture = Image.new("RGB", (400, 200), "white")
    transform = create_transform(160, crop_pct=pct, crop_mode=mode, use_prefetcher=True, mean=(0, 0, 0))
    bright = float((np.asarray(transform(picture)) > 128).mean())  # of the output; scaled to the input below
    scale = {"center": 200 * pct / 160, "border": 400 * pct / 160}.get(mode)
    shown = pct**2 if scale is None else bright * (160 * scale) ** 2 / (400 * 200)
    note = describe_crop(np.array([[400, 200]] * 3), pct, mode)
    assert (note is None) == (shown > 0.9)
    assert note is None or f"the {mode} crop shows {100 * shown:.0f}% of an image" in note


def test_the_transform_of_a_model_takes_any_image_as_predict_does(tmp_path):
    size = {"img_size": 16, "patch_size": 8, "depth": 1, "embed_dim": 32, "num_classes": 5}
    loaded = vilonghorn.load("vilonghorn_nano", "random", size)
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 4), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 8
    Image.fromarray(pixels[..., :3]).save(tmp_path / "turned.png", exif=exif)
    Image.fromarray(pixels).save(tmp_path / "alpha.png")
    Image.fromarray(pixels[..., 0].astype(np.uint16) << 8).save(tmp_path / "deep.png")
    Image.fromarray(pixels[..., :3]).quantize(16).save(tmp_path / "palette.gif")
    Image.fromarray(pixels, "CMYK").save(tmp_path / "print.tif")
    files = sorted(map(str, tmp_path.iterdir()))
    inputs = torch.stack([loaded.transform(Image.open(file)) for file in files])
    assert torch.equal(inputs, torch.stack([loaded.transform(vilonghorn.read_image(file)) for file in files]))
    with torch.inference_mode():
        expected = loaded.model(inputs).softmax(1).max(1).values.tolist()
    found = [result["predictions"][0]["probability"] for result in vilonghorn.predict(loaded, files)]
    assert found == pytest.approx(expected, abs=1e-6)
