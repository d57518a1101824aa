"""With `--features` a file returns the maps that timm's `features_only=True` returns."""

import json

import onnxruntime
import pytest
import timm
import torch

from vilonghorn.cli import main
from vilonghorn.export import capture, export, formats, load_for_export

TRUNK = ("vilonghorn_nano", dict(depth=2, out_indices=(0, -1)), ["rows", "columns"])
HIERARCHY = ("vilonghornv2_nano", {}, ["2*rows", "2*columns"])


@pytest.mark.parametrize("kind, model", [("onnx", HIERARCHY), ("ort", TRUNK)])
@pytest.mark.usefixtures("in_this_process")
def test_a_file_returns_the_maps_of_the_model(kind, model, small, images, write):
    name, kwargs, sizes = model
    form, model = formats.FORMATS[kind], small(name, features_only=True, **kwargs)
    path, found = write(model, kind), json.loads(capture.describe(model)["features"])
    if kind == "ort":
        assert max(error for _, error in export(model, kind, path)) < 1e-5
    assert [level["reduction"] for level in found] == model.feature_info.reduction()
    run = form.load(path, *form.libraries())
    for shape in [(1, 3, 64, 64), (3, 3, 48, 112), (2, 3, 80, 64)]:
        maps = model(images(*shape))
        for size, level in zip(maps, found, strict=True):
            assert size.shape[1:] == (level["channels"], *(-(-side // level["reduction"]) for side in shape[2:]))
        torch.testing.assert_close(list(run(images(*shape))), maps, rtol=0, atol=1e-5)
    if kind == "onnx":
        outputs = onnxruntime.InferenceSession(path).get_outputs()
        assert [output.name for output in outputs] == [level["name"] for level in found]
        assert outputs[0].shape == ["batch", found[0]["channels"], *sizes]


def test_the_features_are_those_of_timm(images):
    batch = images(1, 3, 224, 224)
    for features, expected in (([1, 4], (1, 4)), ([], (3, 4, 5))):
        torch.manual_seed(0)
        loaded = load_for_export("vilonghorn_nano", features=features)
        torch.manual_seed(0)
        timms = timm.create_model("vilonghorn_nano", features_only=True, out_indices=expected).eval()
        torch.testing.assert_close(loaded(batch), [t.detach() for t in timms(batch)], rtol=0, atol=0)
    level = json.loads(capture.describe(load_for_export("vilonghornv2_nano", features=[1]))["features"])
    assert level == [dict(name="features_0", index=1, channels=96, reduction=8)]


def test_an_unknown_index_and_another_order_are_refused(capsys):
    for argv, sentence in (
        (["vilonghorn_nano", "--features", "6"], "feature index 6 is out of range (0 to 5)"),
        (["vilonghorn_nano", "--features", "3", "0"], "--features is [3, 0], expected different indices in ascending"),
    ):
        assert main(["export", *argv, "--to", "onnx"]) == 2
        assert sentence in capsys.readouterr().err
