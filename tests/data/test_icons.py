"""The icons: classes, splits, licences and copies of a small package, and what is said of a damaged one."""

from __future__ import annotations

import base64
import io
import json
import sys

import numpy as np
import pytest
from npm_packages import HELD_OUT, SETS, circle, icon_set, icon_sets, pack, square, write_icon_package
from PIL import Image

from vilonghorn.data import ImageFolder, check_beton
from vilonghorn.data.icons import draw, label_of, split_of, write_icons

ALL = {"min_sets": 8, "beton": False, "progress": False}
pytest.importorskip("resvg_py", reason="resvg-py draws the icons (the extra [icons])")


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def read_manifest(folder):
    return json.loads((folder / "manifest.json").read_text())


@pytest.fixture(scope="module")
def icons(tmp_path_factory):
    folder = tmp_path_factory.mktemp("icons")
    assert write_icons(write_icon_package(folder / "package"), folder / "out", **ALL | {"beton": True})
    return folder / "out"


@pytest.mark.parametrize(
    "name, label",
    [
        ("home", "home"),
        ("home-outline-24", "home"),
        ("arrow-left-bold-duotone", "arrow-left"),
        ("24-hours", "24-hours"),
        ("line", "line"),
        ("fill-line", "fill"),
    ],
)
def test_a_label_is_the_name_without_its_words_of_style(name, label):
    assert label_of(name) == label


def test_no_file_of_an_icon_set_is_in_both_splits(icons):
    train, val = ImageFolder(icons / "train"), ImageFolder(icons / "val")
    sets = [{path.rsplit("/", 1)[1].split("_")[0] for path in split.paths} for split in (train, val)]
    assert sets == [set(SETS) - HELD_OUT, HELD_OUT]
    assert train.classes == val.classes == ["box", "sun"]
    assert [len(train), len(val)] == [18, 6]
    assert {prefix for prefix in SETS if split_of(prefix, 0.2) == "val"} == HELD_OUT


def test_all_sets_of_an_author_can_be_held_out_together(tmp_path):
    sets = {p: icon_set(p, n, author="xi" if p in ("alpha", "beta") else p) for n, p in enumerate(SETS)}
    assert write_icons(write_icon_package(tmp_path / "package", sets), tmp_path / "out", split_by="author", **ALL)
    found = read_manifest(tmp_path / "out")["sets"]
    assert {prefix for prefix in SETS if found[prefix]["split"] == "val"} == HELD_OUT | {"alpha", "beta"}


def test_a_picture_is_the_drawing_in_black_on_white(icons):
    image = np.asarray(Image.open(icons / "train" / "sun" / "alpha_sun.png"))
    y, x = np.mgrid[:64, :64] + 0.5
    distance = np.hypot(x - 32, y - 32) / (64 / 24)  # in units of the SVG; its radius is 3
    assert image.shape == (64, 64, 3) and image.dtype == np.uint8
    assert (image[distance < 2.7] == 0).all() and (image[distance > 3.3] == 255).all()


def test_an_oblong_icon_keeps_its_shape_and_an_offset_is_obeyed(tmp_path):
    sets = icon_sets()
    sets["alpha"]["icons"]["box-fill"] = {"body": '<path d="M-8 0h48v24h-48z"/>', "left": -8, "width": 48, "height": 24}
    assert write_icons(write_icon_package(tmp_path / "package", sets), tmp_path / "out", pixels=32, **ALL)
    image = np.asarray(Image.open(tmp_path / "out/train/box/alpha_box-fill.png"))[..., 0]
    assert (image[8:24] == 0).all() and (image[:8] == 255).all() and (image[24:] == 255).all()


def test_the_files_do_not_depend_on_the_run_or_on_the_form_of_the_package(icons, tmp_path):
    package = write_icon_package(tmp_path / "icons")
    for name, source in (("folder", package), ("tarball", pack(package)), ("above", tmp_path / "unpacked")):
        if name == "above":
            source.mkdir()
            package.rename(source / "package")
        assert write_icons(source, tmp_path / name, **ALL)
        expected = {file: data for file, data in contents(icons).items() if ".beton" not in file}
        assert contents(tmp_path / name) == expected


def test_a_beton_holds_the_images_of_its_split(icons):
    for split, count in (("train", 18), ("val", 6)):
        beton = check_beton(icons / f"{split}.beton", images=True)
        assert (beton.num_samples, beton.num_classes) == (count, 2)
    assert not list(icons.rglob("*.lock"))


def test_the_manifest_names_package_sets_licences_and_authors(icons):
    manifest = read_manifest(icons)
    assert manifest["made_from"]["package"] == "@iconify/json" and manifest["made_from"]["version"] == "2.2.535"
    assert manifest["images"] == {"train": 18, "val": 6}
    assert manifest["sets"]["xi"] == {
        "name": "Xi", "author": "xi", "url": None, "licence": "MIT", "split": "val", "images": 3
    }  # fmt: skip
    assert [manifest[f"{what}_left_out"] for what in ("sets", "classes", "icons", "copies")] == [{}] * 4


@pytest.mark.parametrize("spdx", ["GPL-3.0-or-later", "CC-BY-NC-4.0", "CC-BY-ND-4.0", "Somebody-1.0", None])
def test_a_set_whose_licence_does_not_allow_it_is_left_out(spdx, tmp_path):
    sets = icon_sets() | {"sigma": icon_set("sigma", 9, spdx)}
    assert write_icons(write_icon_package(tmp_path / "package", sets), tmp_path / "out", **ALL)
    manifest = read_manifest(tmp_path / "out")
    assert manifest["sets_left_out"] == {"json/sigma.json": f"licence {spdx}"} and "sigma" not in manifest["sets"]
    assert not list((tmp_path / "out").rglob("sigma_*"))


def test_of_equal_pictures_the_first_is_kept_also_across_splits_and_classes(tmp_path):
    sets = icon_sets()
    sets["xi"]["icons"]["sun-bold"] = dict(sets["alpha"]["icons"]["sun"])
    sets["beta"]["icons"]["sun-fill"] = {"body": sets["alpha"]["icons"]["box-fill"]["body"].replace("h4", "h2h2", 1)}
    assert write_icons(write_icon_package(tmp_path / "package", sets), tmp_path / "out", **ALL)
    copies = read_manifest(tmp_path / "out")["copies_left_out"]
    assert copies == {"xi:sun-bold": "alpha:sun", "beta:sun-fill": "alpha:box-fill"}
    pictures = [Image.open(file).tobytes() for file in (tmp_path / "out").rglob("*.png")]
    assert len(pictures) == len(set(pictures)) == 24


def test_a_class_needs_images_in_both_splits(tmp_path):
    sets = icon_sets()
    for prefix in HELD_OUT:
        del sets[prefix]["icons"]["box-fill"]
    assert write_icons(write_icon_package(tmp_path / "package", sets), tmp_path / "out", **ALL | {"min_sets": 5})
    assert read_manifest(tmp_path / "out")["classes_left_out"] == {"box": "6 images, all in one split"}
    assert ImageFolder(tmp_path / "out/train").classes == ImageFolder(tmp_path / "out/val").classes == ["sun"]


@pytest.mark.parametrize(
    "body, reason",
    [
        ("<g>", "damaged: expected 'g' tag, not 'svg'"),
        ('<path fill="currentColor" d="M2 2zz q"/>', "blank"),
        ("", "blank"),
        ('<circle cx="12" cy="12" r="5" fill="white"/>', "blank"),
        ("&nothing;", "damaged: "),
        ("<g>" * 3000 + "</g>" * 3000, "damaged: "),
        (None, "blank"),
    ],
)
def test_a_damaged_icon_is_left_out_and_listed(body, reason, tmp_path):
    sets = icon_sets()
    sets["gamma"]["icons"]["sun-bold"] = {"body": body}
    assert write_icons(write_icon_package(tmp_path / "package", sets), tmp_path / "out", **ALL)
    manifest = read_manifest(tmp_path / "out")
    assert list(manifest["icons_left_out"]) == ["gamma:sun-bold"]
    assert manifest["icons_left_out"]["gamma:sun-bold"].startswith(reason)
    assert manifest["images"] == {"train": 18, "val": 6}


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "null", '{"prefix": "sigma"}', '{"prefix": "sigma", "info": {"license": "MIT"}, "icons": {}}',
     json.dumps(icon_set("other", 9)), json.dumps(icon_set("sigma", 9) | {"icons": {"sun": "x"}})],
)  # fmt: skip
def test_a_damaged_set_is_left_out_and_listed(text, tmp_path):
    assert write_icons(write_icon_package(tmp_path / "package", icon_sets() | {"sigma": text}), tmp_path / "out", **ALL)
    manifest = read_manifest(tmp_path / "out")
    assert list(manifest["sets_left_out"]) == ["json/sigma.json"]
    assert manifest["sets_left_out"]["json/sigma.json"].startswith("damaged: ")
    assert manifest["images"] == {"train": 18, "val": 6}


def test_hidden_icons_and_names_that_are_no_names_are_not_read(tmp_path):
    sets = icon_sets()
    for name in ("../../sun", "Sun", "sun_bold", "", "sun-"):
        sets["alpha"]["icons"][name] = square(19)
    sets["alpha"]["icons"]["sun-bold"] = circle(11) | {"hidden": True}
    assert write_icons(write_icon_package(tmp_path / "package", sets), tmp_path / "out", **ALL)
    assert read_manifest(tmp_path / "out")["images"] == {"train": 18, "val": 6}


def test_fonts_and_files_of_the_machine_are_not_used(tmp_path):
    Image.new("RGB", (24, 24), "red").save(tmp_path / "red.png")
    size = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" width="24" height="24"'
    assert draw(f"<svg {size}><text y='20'>sun</text></svg>") == "blank"
    for link in (f"href='{tmp_path}/red.png'", f'xlink:href = "file://{tmp_path}/red.png"', "href='&#47;red.png'"):
        assert draw(f"<svg {size}><image {link} width='24' height='24'/></svg>") == "damaged: refers to another file"
    inside = base64.b64encode((tmp_path / "red.png").read_bytes()).decode()
    image = Image.open(
        io.BytesIO(draw(f"<svg {size}><image href='data:image/png;base64,{inside}' width='24' height='24'/></svg>"))
    )
    assert image.getextrema() == ((255, 255), (0, 0), (0, 0))


def test_a_second_call_writes_nothing_and_another_setting_is_refused(icons):
    package = icons.parent / "package"
    before = contents(icons)
    assert not write_icons(package, icons, **ALL | {"beton": True})
    with pytest.raises(FileExistsError, match="out: exists and is not the complete dataset with these settings"):
        write_icons(package, icons, **ALL | {"min_sets": 3})
    assert contents(icons) == before


def test_a_dataset_that_lacks_a_file_does_not_pass_for_complete(tmp_path):
    package = write_icon_package(tmp_path / "package")
    assert write_icons(package, tmp_path / "out", **ALL)
    with pytest.raises(FileExistsError, match="exists and is not the complete dataset"):
        write_icons(package, tmp_path / "out", **ALL | {"beton": True})
    (tmp_path / "out/val/sun/xi_sun.png").unlink()
    with pytest.raises(FileExistsError, match="exists and is not the complete dataset"):
        write_icons(package, tmp_path / "out", **ALL)


def test_a_failure_on_the_way_leaves_nothing(tmp_path, monkeypatch):
    package = write_icon_package(tmp_path / "package")

    def fail(*arguments, **options):
        raise OSError("the disk is gone")

    monkeypatch.setattr("vilonghorn.data.npm.write_beton", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        write_icons(package, tmp_path / "out", **ALL | {"beton": True})
    assert [path.name for path in tmp_path.iterdir()] == ["package"]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"min_sets": 9}, "no name stands in 9 of its 8 sets; give a lower --min-sets"),
        ({"min_sets": 1}, "min_sets 1: expected 2 to 1000"),
        ({"pixels": 4}, "pixels 4: expected 8 to 1024"),
        ({"held_out": 0.25}, "held_out 0.25: expected 0.1, 0.2, ... or 0.9"),
        ({"split_by": "class"}, "split_by 'class': expected set or author"),
    ],
)
def test_an_option_out_of_range_is_refused(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        write_icons(write_icon_package(tmp_path / "package"), tmp_path / "out", **ALL | options)
    assert not (tmp_path / "out").exists()


def test_a_package_without_the_sets_is_refused(tmp_path):
    package = write_icon_package(tmp_path / "package", {})
    with pytest.raises(ValueError, match=r"package: no icon set in it \(json/\*.json\) that can be used"):
        write_icons(package, tmp_path / "out", **ALL)


def test_a_missing_rasteriser_is_said_in_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(ImportError, match=r"resvg-py draws the icons; run: pip install 'vilonghorn\[icons\]'"):
        write_icons(tmp_path, tmp_path / "out", **ALL)
