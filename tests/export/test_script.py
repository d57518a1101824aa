"""The script beside an exported file gives what `vilonghorn predict` gives, on photographs of every kind."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from left_run import NAMES, leave_run
from PIL import Image
from timm.data import create_transform

from vilonghorn import load, predict
from vilonghorn.cli import main
from vilonghorn.data.image_file import read_image
from vilonghorn.export import capture, export, formats, load_for_export

RESULT = re.compile(r"(.*): (\w+) ([\d.]+)%, ")


def run(script, *arguments):
    """The script in another folder, with Python's paths of an installation alone."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=Path(script).anchor)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Photographs: each EXIF orientation, and every kind that is not plain RGB."""
    folder, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(3)
    small = Image.fromarray(rng.integers(0, 256, (5, 7, 4), dtype=np.uint8))
    rgba = small.resize((83, 52), Image.Resampling.BICUBIC)
    rgb, gray = rgba.convert("RGB"), rgba.convert("L")
    for number in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = number
        rgb.save(folder / f"turned-{number}.jpg", exif=exif, quality=95)
    rgba.save(folder / "transparent.png")
    gray.save(folder / "gray.png")
    Image.fromarray(np.asarray(gray, np.uint16) * 257).save(folder / "gray16.png")
    rgb.quantize(16).save(folder / "palette.png", transparency=3)
    rgb.resize((400, 9)).save(folder / "long.png")
    rgb.resize((7, 300)).save(folder / "high.png")
    rgb.resize((11, 13)).save(folder / "small.png")
    return folder


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A run, and its file of --to onnx with the script, made by the command."""
    folder = tmp_path_factory.mktemp("exported")
    leave_run(folder / "run", depth=1)
    assert main(["export", str(folder / "run"), "--to", "onnx", "--output", str(folder / "random.onnx")]) == 0
    return folder


def test_the_script_classifies_as_predict_does_and_refuses_in_a_sentence(exported, photos):
    script = exported / "random.py"  # the name of a module that numpy imports
    for module in ("pathlib", "re", "warnings"):  # that Python imports for the first lines
        (exported / f"{module}.py").write_text("raise ImportError")
    assert "vilonghorn import" not in script.read_text() and "import vilonghorn" not in script.read_text()
    (photos / "notes.txt").write_text("no image")
    files = sorted(map(str, photos.iterdir()))
    done = run(script, *files, photos, photos / "missing.jpg")
    found = {name: (label, float(percent)) for name, label, percent in RESULT.findall(done.stdout)}
    results = {result["image"]: result for result in predict(load(exported / "run"), files)}
    assert found.keys() == {name for name, result in results.items() if "error" not in result} and len(found) == 15
    for name, (label, percent) in found.items():
        best = results[name]["predictions"][0]
        assert label == best["name"] in NAMES and percent / 100 == pytest.approx(best["probability"], abs=1e-3)
    errors = done.stderr.splitlines()
    assert done.returncode == 1 and [line.split(": ")[1] for line in errors] == [
        str(photos / name) for name in ("notes.txt", "", "missing.jpg")
    ]
    assert all("not a readable image" in line for line in errors)


@pytest.mark.parametrize("interpolation", ["bicubic", "box", "bilinear", "nearest", "lanczos", "hamming"])
@pytest.mark.parametrize("crop_mode", ["center", "squash", "border"])
def test_the_input_is_bit_by_bit_that_of_timm_with_the_arguments_of_the_file(interpolation, crop_mode, photos):
    code = {"__file__": "/nowhere/photos.py", "__name__": "photos"}
    exec(compile(formats.make_script("photos.onnx"), "photos.py", "exec"), code)
    for size, crop_pct in (((3, 24, 24), 0.875), ((3, 32, 20), 1.0), ((3, 20, 36), 0.7)):
        cfg = dict(input_size=size, mean=(0.5, 0.4, 0.3), std=(0.5, 0.6, 0.7), crop_pct=crop_pct)
        cfg |= dict(interpolation=interpolation, crop_mode=crop_mode)
        stored = json.loads(json.dumps(cfg))
        for file in photos.glob("*.[jp][pn]g"):
            picture = read_image(file)
            assert np.array_equal(code["read"](file), picture)
            try:
                expected = create_transform(**cfg)(picture)
            except ValueError:  # a side of less than half a pixel
                with pytest.raises(ValueError, match="for this model; crop it"):
                    code["prepare"](picture, **stored)
                assert crop_mode == "border" and file.stem in ("long", "high")
                continue
            torch.testing.assert_close(create_transform(**stored)(picture), expected, rtol=0, atol=0)
            assert np.array_equal(code["prepare"](picture, **stored)[0], expected)


def test_a_file_says_how_images_are_read_and_has_no_classes_for_maps(small, checkpoint):
    found = {name: json.loads(value) for name, value in capture.describe(small()).items()}
    assert found["reading"]["orientation"] == "exif" and found["reading"]["background"] == [255, 255, 255]
    model = load_for_export("vilonghornv2_nano.icons480", features=[1])
    assert json.loads(capture.describe(model)["classes"]) is None
    model = timm.create_model("vilonghornv2_nano.icons480", num_classes=4)  # others than those of its configuration
    assert json.loads(capture.describe(model)["classes"]) is None
    model.reset_classifier(480)
    assert len(json.loads(capture.describe(model)["classes"])) == 480
    for made in (small(img_size=(32, 48)), timm.create_model("vilonghornv2_nano", img_size=(32, 48))):
        assert json.loads(capture.describe(made)["preprocessing"])["input_size"] == [3, 32, 48]
    for size in ([48], [24, 40]):  # not the size of the record
        loaded = load_for_export("vilonghorn_nano", checkpoint[0], size)
        found = json.loads(capture.describe(loaded)["preprocessing"])
        assert found["input_size"] == [3, size[0], size[-1]]


@pytest.mark.parametrize("kind", ["ort", "pt2", "openvino"])
def test_other_formats_have_the_script_and_ort_needs_the_library(kind, small, photos, write, tmp_path):
    if kind == "openvino":
        pytest.importorskip("openvino", reason="needs openvino: pip install '.[openvino]'")
    model, form, image = small(), formats.FORMATS[kind], photos / "gray.png"
    path = write(model, kind)
    script = form.script(path)
    script.write_bytes(formats.make_script(path.name))
    if kind == "ort":
        done = run(script, image)
        assert done.returncode == 2 and "needs libvilonghorn_cpu: copy it beside this script" in done.stderr
        (tmp_path / form.library().name).symlink_to(form.library())
    done = run(script, image, "--top", "2")
    assert done.returncode == 0, done.stderr
    scores = model(create_transform(**json.loads(capture.describe(model)["preprocessing"]))(read_image(image))[None])
    best = scores.softmax(1)[0].topk(2)
    expected = ", ".join(f"{index} {share:.1%}" for share, index in zip(*(values.tolist() for values in best)))
    assert done.stdout == f"{image}: {expected}\n"


def test_a_script_of_the_user_stays_and_one_of_an_export_is_replaced(small, tmp_path):
    script = tmp_path / "photos.py"
    script.write_text("print('mine')")
    with pytest.raises(FileExistsError, match="photos.py: not written by vilonghorn export: rename it"):
        export(small(), "onnx", tmp_path / "photos.onnx", script=True)
    assert [*tmp_path.iterdir()] == [script]
    script.write_bytes(formats.make_script("photos.pt2"))
    assert formats.FORMATS["ort"].script(tmp_path / "photos.ort.onnx") == script


def test_a_name_cannot_become_code():
    name = 'a\'"""\n\\$file\udce9.onnx'
    code = {"__file__": "/nowhere/photos.py", "__name__": "photos"}
    exec(compile(formats.make_script(name), "photos.py", "exec"), code)
    assert code["FILE"] == name
