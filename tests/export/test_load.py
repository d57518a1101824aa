"""The exported model has the checkpoint's weights, classes and image size."""

import json
from pathlib import Path

import pytest
import timm
import torch
from left_run import NAMES, SIDE, leave_run
from PIL import Image

import vilonghorn
from vilonghorn import load
from vilonghorn.export import load_for_export
from vilonghorn.export.capture import capture, describe, input_shape


def test_a_checkpoint_fits_another_image_size_and_a_state_dict_tells_its_classes(checkpoint, small, images, tmp_path):
    resized, expected = load_for_export("vilonghorn_nano", checkpoint[0], [48, 32]), small()
    expected.set_input_size((48, 32))
    batch = images(2, 3, 48, 32)
    torch.testing.assert_close(resized(batch), expected(batch), rtol=0, atol=1e-6)
    full = timm.create_model("vilonghorn_nano", num_classes=3).eval()
    torch.save(full.state_dict(), tmp_path / "plain.pth")
    batch = images(1, 3, 224, 224)
    loaded = load_for_export("vilonghorn_nano", tmp_path / "plain.pth")
    torch.testing.assert_close(loaded(batch), full(batch).detach(), rtol=0, atol=1e-6)


def test_positions_are_resampled_to_a_size_of_as_many_patches(images):
    name, batch = "vilonghorn_nano_patch8.icons480", images(2, 3, 128, 32)
    model = timm.create_model(name, pretrained=True, img_size=(128, 32)).eval()
    exported = load_for_export(name, img_size=[128, 32])
    torch.testing.assert_close(exported(batch), model(batch).detach(), rtol=0, atol=1e-6)


def test_a_run_is_its_best_or_last_weights_with_its_classes_and_preprocessing(tmp_path, images):
    model, batch = leave_run(tmp_path / "run"), images(2, 3, SIDE, SIDE)
    loaded = load_for_export(tmp_path / "run")
    torch.testing.assert_close(loaded(batch), model(batch).detach(), rtol=0, atol=1e-6)
    found = {name: json.loads(value) for name, value in describe(loaded).items()}
    assert found["model"] == "vilonghorn_nano" and found["classes"] == NAMES
    transform = timm.data.create_transform(**found["preprocessing"], is_training=False)
    for photograph in (Image.new("RGB", size, (200, 100, 50)) for size in ((30, 20), (16, 16))):
        torch.testing.assert_close(transform(photograph), load(tmp_path / "run").transform(photograph))

    (tmp_path / "run/best.safetensors").rename(tmp_path / "run/last.safetensors")
    with pytest.raises(FileNotFoundError, match="best.safetensors"):
        load_for_export(tmp_path / "run")
    torch.testing.assert_close(load_for_export(tmp_path / "run", "last")(batch), loaded(batch), rtol=0, atol=0)
    with pytest.raises(ValueError, match="expected best or last: .*run is the directory of a run"):
        load_for_export(tmp_path / "run", "best.safetensors")


def test_a_run_that_pads_its_images_is_exported_at_whole_patches(tmp_path):
    leave_run(tmp_path / "run", "vilonghornv2_nano", dynamic_img_pad=True, stem_stride=2, img_size=None)
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace(f"image_size: {SIDE}", "image_size: 20"))
    with pytest.raises(ValueError, match="20x20 is not a whole number of 8x8 patches .*do not pad: give --img-size"):
        load_for_export(tmp_path / "run")
    found = json.loads(describe(load_for_export(tmp_path / "run", img_size=[24]))["preprocessing"])
    assert found["input_size"] == [3, 24, 24]


def test_a_hierarchy_has_the_image_size_of_its_run_or_the_one_given(tmp_path):
    leave_run(tmp_path / "run", "vilonghornv2_nano", stem_stride=2, img_size=None)
    for given, grid in ((None, (SIDE // 8, SIDE // 8)), ([48, 32], (6, 4))):
        assert load_for_export(tmp_path / "run", img_size=given).grid_size() == grid
    found = json.loads(describe(load_for_export("vilonghornv2_nano", img_size=[96, 64]))["preprocessing"])
    assert found["input_size"] == [3, 96, 64]


def test_a_file_of_one_size_takes_images_of_the_size_of_its_preprocessing():
    model = load_for_export("vilonghornv2_nano.lite0")
    size = json.loads(describe(model)["preprocessing"])["input_size"]
    assert list(input_shape(capture(model, fixed=True))) == [1, *size] == [1, 3, 112, 112]


def test_a_run_with_overlapping_patches_is_exported(tmp_path, images):
    model, batch = leave_run(tmp_path / "run", stride=2), images(2, 3, SIDE, SIDE)
    torch.testing.assert_close(load_for_export(tmp_path / "run")(batch), model(batch).detach(), rtol=0, atol=1e-6)


def test_the_weights_of_the_package_are_exported_by_their_tag_and_from_their_file(images):
    name, batch = "vilonghorn_nano_patch8", images(2, 3, 64, 64)
    expected = timm.create_model(f"{name}.icons480", pretrained=True).eval()
    file = Path(vilonghorn.__file__).parent / "weights" / f"{name}.icons480.safetensors"
    for model, tagged in ((load_for_export(f"{name}.icons480"), True), (load_for_export(name, file), False)):
        torch.testing.assert_close(model(batch), expected(batch).detach(), rtol=0, atol=1e-6)
        found = {key: json.loads(value) for key, value in describe(model).items()}
        data = json.loads(json.dumps(timm.data.resolve_model_data_config(expected)))
        assert found["preprocessing"] == data and found["model"] == name
        assert found["classes"] == (list(expected.pretrained_cfg["label_names"]) if tagged else None)
    with pytest.raises(ValueError, match=r"cannot make vilonghorn_nano\.icons .*Invalid pretrained tag"):
        load_for_export("vilonghorn_nano.icons")
