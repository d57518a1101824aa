"""Every kind of image file becomes the right RGB, or is refused with its name."""

import errno
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, Image
from timm.data import create_transform

import vilonghorn
from vilonghorn.data import ImageFolder, image_file, write_beton
from vilonghorn.data.image_file import UnreadableImage, describe_crop, image_sizes, read_image, to_rgb

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


@pytest.mark.parametrize("bits", [10, 14])
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
    with pytest.raises(UnreadableImage, match="16 bits, of which the highest two are 0; scale or"):
        read_image(file)
    if kind == "png":
        with pytest.raises(ValueError, match="16 bits, of which the highest two are 0"):
            to_rgb(Image.open(file).copy())
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
    "I;16": Image.fromarray(np.uint16([[40 << 8, 70 << 8], [41 << 8] * 2])),
    "P": Image.fromarray(np.uint8([[40, 40], [41, 41]])).convert("P"),
    "RGB": Image.fromarray(np.uint8([[[40, 50, 60]] * 2, [[41, 50, 60]] * 2])),
}


@pytest.mark.parametrize("mode", TRANSPARENT)
def test_transparent_pixels_become_white(tmp_path, mode):
    key = {"L": 41, "I;16": 41 << 8, "P": 41, "RGB": (41, 50, 60)}
    TRANSPARENT[mode].save(tmp_path / "x.png", **({"transparency": key[mode]} if mode in key else {}))
    pixels = np.asarray(read_image(str(tmp_path / "x.png")))
    assert (pixels[1] == 255).all() and ((pixels[0] >= 40) & (pixels[0] <= 70)).all()


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
    assert image_sizes([f"{tmp_path}/x{suffix}"]).tolist() == [[48, 32]]
    for image in (once, to_rgb(once), to_rgb(Image.open(tmp_path / f"x{suffix}"))):
        assert np.abs(np.asarray(image).astype(int) - np.asarray(upright)[..., None]).max() < 12


def test_an_error_that_quotes_a_file_is_one_printable_line(tmp_path, photo, monkeypatch):
    photo(0).save(tmp_path / "x.png")
    monkeypatch.setattr(image_file, "to_rgb", lambda image: (_ for _ in ()).throw(ValueError("bad token \x1b[2J\n\0")))
    with pytest.raises(UnreadableImage, match=r"x.png: not a readable image \(bad token \\x1b\[2J \\x00\); convert"):
        read_image(tmp_path / "x.png")


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
