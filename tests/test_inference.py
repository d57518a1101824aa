"""`vilonghorn.load` and `vilonghorn.predict`: runs, timm's models and files of weights, with their classes."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
from left_run import NAMES, leave_run, make_image
from PIL import Image
from safetensors.torch import save_file

import vilonghorn
from vilonghorn import load, predict
from vilonghorn.engine.checkpoint import load_weights, save_weights
from vilonghorn.engine.evaluate import pretrained_class_names
from vilonghorn.export import load_for_export

NANO = "vilonghorn_nano"
KWARGS = dict(num_classes=6, img_size=16, patch_size=4, depth=2, embed_dim=32)  # of `leave_run`


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run", leave_run(tmp_path / "run")


def test_a_run_is_loaded_ready_for_photographs(run, tmp_path):
    directory, model = run
    image, loaded = make_image(tmp_path / "a.png", 1), load(directory)
    assert loaded.class_names == NAMES and not loaded.model.training and loaded.architecture == NANO
    assert loaded.weights == "best weights (ema, epoch 3) of run run"
    given = loaded.transform(Image.open(tmp_path / "a.png"))
    torch.testing.assert_close(loaded.model(given[None]), model(image), rtol=0, atol=1e-5)
    for device in ("abacus", "meta"):
        with pytest.raises(ValueError, match=f"^--device is '{device}', which cannot be used here"):
            load(directory, device=device)
    with pytest.raises(AttributeError, match="no attribute 'laod'"):
        vilonghorn.laod  # noqa: B018


@pytest.mark.parametrize("name", ["vilonghornv2_nano", "vim_nano_patch8"])
def test_the_head_of_a_state_dict_tells_the_number_of_classes(name, tmp_path):
    model = timm.create_model(name, num_classes=7)
    torch.save(model.state_dict(), tmp_path / "a.pth")
    loaded = load(name, str(tmp_path / "a.pth")).model
    assert torch.equal(loaded.get_classifier().weight, model.get_classifier().weight)
    with pytest.raises(ValueError, match="returns maps, expected a classifier: leave out features_only"):
        load(name, "random", dict(features_only=True))


@pytest.mark.parametrize("kwargs", [dict(norm_layer="layernorm"), dict(norm_layer=None), dict(exportable=True)])
def test_a_run_with_another_norm_is_loaded(kwargs, tmp_path):
    model = leave_run(tmp_path / "run", **kwargs)
    image = make_image(tmp_path / "a.png", 1)
    torch.testing.assert_close(load(tmp_path / "run").model(image), model(image), rtol=0, atol=1e-5)


def test_weights_in_a_file_bring_their_names_if_they_have_any(run, tmp_path):
    directory, model = run
    image = make_image(tmp_path / "a.png", 1)
    torch.save(model.state_dict(), tmp_path / "plain.pth")
    # The registered model normalises as for ImageNet, the run did not.
    mean, std = (torch.tensor(v)[:, None, None] for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    pixels = image[0] * torch.tensor((0.5, 0.6, 0.7))[:, None, None] + torch.tensor((0.5, 0.4, 0.3))[:, None, None]
    # The file of a run has the arguments of its model.
    for file, kwargs in ((directory / "best.safetensors", None), (tmp_path / "plain.pth", KWARGS)):
        loaded = load(NANO, str(file), kwargs)
        assert loaded.preprocessing["mean"] == (0.485, 0.456, 0.406)
        assert loaded.transform.transforms[1].size == 18  # crop_pct 0.875
        assert torch.allclose(loaded.denormalize((pixels - mean) / std), pixels.permute(1, 2, 0), atol=1e-6)
        assert loaded.weights == f"weights of {file.name}"
        (result,) = predict(loaded, [str(tmp_path / "a.png")])
        names = [p["name"] for p in result["predictions"]]
        assert names == [None if kwargs else NAMES[p["class"]] for p in result["predictions"]]
    assert loaded.class_name(3) == "3"


def test_a_file_of_a_run_brings_its_preprocessing(run, tmp_path):
    directory, file = run[0], tmp_path / "a.safetensors"
    weights, record = load_weights(directory / "best.safetensors")
    data = dict(image_size=[16, 16], mean=[0.5, 0.4, 0.3], std=[0.5, 0.6, 0.7], crop_pct=1.0, interpolation="bicubic")
    save_weights(file, weights, record | {"data": data | {"crop_mode": "center"}})
    assert load(NANO, str(file)).preprocessing == load(directory).preprocessing
    assert load_for_export(NANO, file).pretrained_cfg.items() >= load(directory).preprocessing.items()
    own = load(NANO, str(file), {"pretrained_cfg_overlay": {"mean": (0.1, 0.2, 0.3), "crop_pct": 0.5}}).preprocessing
    assert own == load(directory).preprocessing | {"mean": (0.1, 0.2, 0.3), "crop_pct": 0.5}
    for wrong in (
        dict(image_size=30_000),
        dict(mean=["a"] * 3),
        dict(crop_mode="x"),
        dict(url="http://a"),
        dict(std=0),
    ):
        save_weights(file, weights, record | {"data": data | wrong})
        with pytest.raises(ValueError, match=f"^{file} has a record of a run whose data are .*Error: "):
            load(NANO, str(file))
    save_weights(file, weights, record | {"data": [1]})
    with pytest.raises(ValueError, match="data '\\[1\\]', expected options by name"):
        load(NANO, str(file))


def test_an_image_that_is_too_long_is_named_and_a_model_of_another_dtype_predicts(run, tmp_path):
    loaded = load(run[0])
    Image.new("RGB", (2, 3000)).save(tmp_path / "long.png")
    make_image(tmp_path / "a.png", 1)
    loaded = replace(loaded, preprocessing=loaded.preprocessing | {"crop_mode": "border"})
    long, other = predict(loaded, (tmp_path / name for name in ("long.png", "a.png")))
    assert "long.png: its 2x3000 pixels cannot be resized: height and" in long["error"]
    assert other["image"] == str(tmp_path / "a.png")
    loaded.model.bfloat16()
    (short,) = predict(loaded, [tmp_path / "a.png"])
    for rounded, exact in zip(short["predictions"], other["predictions"]):
        assert rounded["name"] == exact["name"] and rounded["probability"] == pytest.approx(
            exact["probability"], abs=0.05
        )


def test_published_weights_bring_the_names_of_their_classes():
    names = pretrained_class_names(timm.create_model(NANO, img_size=32))
    assert len(names) == 1000 and names[0] == "tench, Tinca tinca" and "toilet tissue" in names[999]
    assert pretrained_class_names(timm.create_model(NANO, img_size=32, num_classes=10)) is None
    cfg = dict(num_classes=2, label_names=("a", "b"))
    own = timm.create_model(NANO, img_size=32, num_classes=2, pretrained_cfg_overlay=cfg)
    assert pretrained_class_names(own) == ["a", "b"]


@pytest.mark.parametrize("name", ["vilonghornv2_nano.lite0", "vilonghornv2_nano.icons480", "vim_nano_patch8.icons480"])
def test_a_classifier_that_is_not_of_the_weights_is_called_random(name):
    sentence = f"{name} with pretrained weights and a random classifier of 3 classes"
    with pytest.warns(UserWarning, match=f"^{re.escape(sentence)}: its predictions mean nothing until it is trained"):
        assert load(name, model_kwargs=dict(num_classes=3), device="cpu").name == sentence
    for kwargs in ({}, dict(num_classes=0)):
        assert load(name, model_kwargs=kwargs, device="cpu").name == f"{name} with pretrained weights"
    assert load(name, "random", dict(num_classes=3), device="cpu").name == f"{name} with random weights"


def test_a_class_is_found_by_its_name_or_number(run):
    loaded = load(run[0])
    digits = replace(loaded, class_names=["1", "0"])
    assert loaded.class_index("eel") == loaded.class_index("4") == 4
    assert [digits.class_index(name) for name in ("1", "0", "3")] == [0, 1, 3]  # a name comes before a number
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    assert replace(digits, class_names=["0", composed]).class_index(decomposed) == 1
    assert replace(digits, class_names=["0", decomposed]).class_index(composed) == 1
    with pytest.raises(ValueError, match="no class 'eal'; .*eel"):
        loaded.class_index("eal")
    with pytest.raises(ValueError, match="no class 'cat'; the classes have numbers only"):
        replace(digits, class_names=None).class_index("cat")


@pytest.mark.parametrize(
    "key, value",
    [
        ("mean", "a"),
        ("std", [None] * 3),
        ("std", []),
        ("interpolation", ["bicubic"]),
        ("crop_pct", "1"),
        ("crop_pct", 1e30),
        ("crop_pct", -1),
        ("crop_mode", "x"),
    ],
)
def test_a_folder_whose_transform_cannot_be_made_is_refused(tmp_path, key, value):
    cfg = {"input_size": [3, 32, 32], "mean": [0.5] * 3, "std": [0.5] * 3, "num_classes": 2}
    config = {"architecture": NANO, "num_classes": 2, "pretrained_cfg": cfg | {key: value}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="the configuration of local-dir:.* gives no transform of images .*Error: "):
        load(f"local-dir:{tmp_path}", "random")


@pytest.mark.parametrize(
    "name, checkpoint, kwargs, sentence",
    [
        ("runs/none-so-far", None, None, "runs/none-so-far is neither .* nor a model that timm knows; "),
        ("vilonghorn_nanno", None, None, "vilonghorn_nanno is neither .*vilonghorn_nano"),
        (NANO, None, None, "no pretrained weights for vilonghorn_nano: none are published yet"),
        (NANO, "{run}/best.safetensors", dict(depth=3), "cannot make vil.* with the weights of .*best"),
        ("vim_nano", "{run}/best.safetensors", None, "contains weights of vilonghorn_nano, not of vim_nano"),
        (NANO, "{run}/scalar.safetensors", None, "cannot make vilonghorn_nano with the weights of .*scalar"),
        (NANO, "random", dict(hue=3), "cannot make vilonghorn_nano .*hue"),
        (NANO, "random", dict(in_chans=1), "images of 1 channels"),
        ("vilonghornv2_nano", "random", dict(num_classes=-1), "v2_nano has num_classes -1, expected 0 or more"),
        ("{run}", "first", None, "--checkpoint is 'first', expected best or last"),
        ("{run}", "last", None, "there are no weights .*last.safetensors"),
        ("{run}", None, dict(depth=3), "leave out --model-kwargs"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_refused(run, name, checkpoint, kwargs, sentence):
    save_file({"head.weight": torch.tensor(1.0)}, run[0] / "scalar.safetensors")
    name, checkpoint = (given and given.format(run=run[0]) for given in (name, checkpoint))
    with pytest.raises((ValueError, OSError)) as refused:
        load(name, checkpoint, kwargs)
    assert re.search(sentence, str(refused.value)), refused.value


def test_a_run_of_a_model_with_a_tag_is_a_run_of_the_model(run, tmp_path):
    file, kwargs = str(tmp_path / "tagged.safetensors"), KWARGS | dict(drop_path_rate=0.1)
    save_weights(Path(file), run[1].state_dict(), dict(model=f"{NANO}.icons480", kwargs=kwargs))
    assert len(load(NANO, file).model.blocks) == KWARGS["depth"]
    with pytest.raises(ValueError, match=r"contains weights of vilonghorn_nano\.icons480, not of vim_nano"):
        load("vim_nano", file)


def test_models_without_classes_or_finite_scores_predict_nothing(run, tmp_path):
    make_image(tmp_path / "a.png", 1)
    state, files = run[1].state_dict(), [str(tmp_path / "a.png")]
    for value, sentence in ((float("nan"), "(contain|hold) NaN or infinity"), (3e38, "not finite numbers")):
        torch.save(state | {"head.weight": torch.full_like(state["head.weight"], value)}, tmp_path / "a.pth")
        with pytest.raises(ValueError, match=sentence):  # of the file, or of a sum that overflows
            list(predict(load(NANO, str(tmp_path / "a.pth"), KWARGS), files))
    with pytest.raises(ValueError, match="has no classifier: give .*, such as a run that was trained from it"):
        list(predict(load(NANO, "random", dict(num_classes=0, img_size=32)), files))
