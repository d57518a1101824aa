"""Classes are matched by name, checks that cannot be made are named, and what a crop shows is said."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform

from vilonghorn.data import create_loader, write_beton
from vilonghorn.data.beton.format import manifest_path

BETON = pytest.param("beton", marks=pytest.mark.needs_ffcv)
EVAL = {"batch_size": 8, "image_size": 16, "training": False, "workers": 0, "crop_pct": 1.0}
CLASSES = ["eel", "ant", "cat"]


@pytest.fixture(params=["folder", BETON])
def source(request, tmp_path, photo):
    """Two of three classes, in a folder or a file."""
    for name in ("cat", "eel"):
        (tmp_path / "some" / name).mkdir(parents=True)
        photo(len(name), 40, 40).save(tmp_path / "some" / name / "x.png")
    if request.param == "folder":
        return tmp_path / "some"
    return write_beton(tmp_path / "some", tmp_path / "some.beton", progress=False).path


def test_held_out_data_that_lack_a_class_keep_the_labels_of_training(source):
    with pytest.warns(UserWarning, match=r"some(.beton)?: no image of 1 of 3 classes: ant$"):
        loader = create_loader(source, **EVAL, classes=CLASSES)
    assert loader.num_classes == 3 and loader.class_names == CLASSES
    assert next(loader.epoch(0))[1].tolist() == [2, 0]
    with pytest.raises(
        ValueError, match="there is no class eel in the training data or the model, which have cat, dog"
    ):
        create_loader(source, **EVAL, classes=["cat", "dog"])


@pytest.mark.needs_ffcv
@pytest.mark.parametrize(
    ("with_manifest", "lost"),
    [(False, "is missing, so that class names are unknown, and damaged"), (True, "has no checksums, so that")],
)
def test_what_is_lost_without_a_manifest_or_its_checksums_is_said(tmp_path, raw_beton, with_manifest, lost):
    path = Path(shutil.copy(raw_beton, tmp_path / "x.beton"))
    manifest = json.loads(manifest_path(raw_beton).read_text())
    del manifest["crc32"]
    if with_manifest:
        manifest_path(path).write_text(json.dumps(manifest))
    with pytest.warns(UserWarning, match=f"x.beton.json {lost}.* images are not noticed; write the file again"):
        create_loader(path, **EVAL)
    with pytest.raises(ValueError, match=rf"x.beton.json {lost}.* \(checksums is true; null reads it as it is\)"):
        create_loader(path, **EVAL, checksums=True)


@pytest.mark.parametrize("classes", [{"cat": 1, "eel": 0}, {"cat", "eel"}, "cat", b"cat", 3, [b"cat", b"eel"], [0, 1]])
def test_classes_without_an_order_or_that_are_no_texts_are_refused(source, classes):
    with pytest.raises(ValueError, match="classes is .*, expected a list of names, by label"):
        create_loader(source, **EVAL, classes=classes)


@pytest.mark.parametrize("classes", [tuple(CLASSES), dict.fromkeys(CLASSES).keys(), np.array(CLASSES)])
def test_classes_in_any_order_that_stays_are_taken(source, classes):
    assert create_loader(source, **EVAL, classes=classes).class_names == CLASSES


def test_a_class_that_is_named_twice_has_no_label(source):
    with pytest.raises(ValueError, match="there are several classes cat among those given, cat, eel, cat: rename"):
        create_loader(source, **EVAL, classes=["cat", "eel", "cat"])


@pytest.mark.needs_ffcv
def test_labels_without_names_are_the_numbers_of_the_classes_given(tmp_path, photo):
    path = write_beton([(photo(0, 40, 40), i) for i in (0, 2)], tmp_path / "x.beton", progress=False).path
    with pytest.warns(UserWarning, match="x.beton: its labels have no names: label 0 is taken for eel, and so on$"):
        loader = create_loader(path, **EVAL, classes=CLASSES)
    assert loader.class_names == CLASSES and next(loader.epoch(0))[1].tolist() == [0, 2]
    with pytest.raises(ValueError, match="x.beton: its labels have no names and go up to 2, but there are 2 classes"):
        create_loader(path, **EVAL, classes=CLASSES[:2])


@pytest.mark.parametrize("mode", ["center", "squash", "border"])
@pytest.mark.parametrize(("pct", "size"), [(1.0, 32), (0.8, 32), (0.8, (24, 40)), (0.8, (40, 24))])
def test_a_folder_is_evaluated_as_timm_crops(tmp_path, photo, mode, pct, size):
    (tmp_path / "a").mkdir()
    photo(0, 90, 50).save(tmp_path / "a" / "x.png")
    mean = (0.2, 0.5, 0.7)
    options = EVAL | {"crop_pct": pct, "image_size": size, "mean": mean, "std": (1, 1, 1)}
    images, _ = next(create_loader(tmp_path, **options, crop_mode=mode).epoch(0))
    expected = create_transform(size, crop_pct=pct, crop_mode=mode, mean=mean, std=(1, 1, 1), interpolation="bicubic")
    torch.testing.assert_close(images[0], expected(photo(0, 90, 50)), atol=1e-5, rtol=0)


@pytest.mark.needs_ffcv
def test_a_beton_is_cropped_and_squashed_as_timm_does_and_has_no_border(tmp_path, photo):
    path = write_beton([(photo(0, 90, 50), 0)], tmp_path / "x.beton", progress=False).path
    plain = EVAL | {"image_size": 32, "mean": (0, 0, 0), "std": (1 / 255,) * 3}
    boxes = {("squash", 1.0, (32, 32)): None, ("squash", 1.0, (20, 44)): None}
    boxes |= {("center", 1.0, (40, 20)): (32, 0, 57, 50), ("center", 1.0, (9, 40)): (0, 15, 90, 35)}
    boxes |= {("center", 0.9, (30, 40)): (15, 2, 75, 47)}
    for (mode, pct, size), box in boxes.items():
        options = plain | {"image_size": size, "crop_mode": mode, "crop_pct": pct}
        images, _ = next(create_loader(path, **options).epoch(0))
        expected = np.asarray(photo(0, 90, 50).resize(size[::-1], Image.Resampling.BICUBIC, box=box), float)
        assert np.abs(images[0].permute(1, 2, 0).numpy() - expected).max() < 1e-3
    with pytest.raises(ValueError, match="x.beton: crop_mode border reads image folders only; a .beton has center or"):
        create_loader(path, **plain, crop_mode="border")
    create_loader(path, **plain | {"training": True, "batch_size": 1}, crop_mode="border")


@pytest.mark.needs_ffcv
def test_classes_that_images_without_labels_do_not_use_are_said(tmp_path, photo):
    path = write_beton([(photo(0, 90, 50), i) for i in range(2)], tmp_path / "x.beton", progress=False).path
    with pytest.warns(UserWarning, match=r"x.beton: its classes \(2\) are not used to learn from images"):
        loader = create_loader(path, **EVAL, labelled=False, classes=["other"])
    assert next(loader.epoch(0))[1].tolist() == [0, 0]


@pytest.mark.parametrize("training", [True, False])
def test_what_the_centre_crop_cuts_is_said_before_an_evaluation(tmp_path, photo, training, recwarn):
    (tmp_path / "a").mkdir()
    photo(0, 100, 50).save(tmp_path / "a" / "x.png")
    create_loader(tmp_path, **EVAL | {"training": training, "batch_size": 1})
    found = ["the center crop shows 50% of an image (median); crop_mode squash" in str(w.message) for w in recwarn]
    assert any(found) != training
