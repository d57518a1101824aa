"""The program of `--to coreml` is run by tests/helpers/mil.py, because Core ML runs on macOS only."""

import json
import sys

import pytest
import torch
from mil import load_program
from PIL import Image

from vilonghorn.cli import export as command
from vilonghorn.cli import main
from vilonghorn.export import VerificationError, export, verify

coremltools = pytest.importorskip("coremltools", reason="needs coremltools: pip install '.[coreml]'")
NAMES = ["arctic fox", '"b"', "c", "d", "é"]


class RunInTorch(coremltools.models.MLModel):
    """In place of MLModel, which predicts on macOS only."""

    def __init__(self, *args, skip_model_load=False, **kwargs):
        super().__init__(*args, skip_model_load=True, **kwargs)
        if not skip_model_load:
            self.operators, self.run = load_program(self)

    def predict(self, inputs):
        picture = inputs["images"]
        assert isinstance(picture, Image.Image) and picture.mode == "RGB"
        pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
        pixels = pixels.view(1, picture.height, picture.width, 3).permute(0, 3, 1, 2).float()
        values = self.run(images=pixels)
        found = {output.name: values[output.name] for output in self.get_spec().description.output}
        if "classLabel" in found:
            found["classLabel_probs"] = dict(zip(found["classLabel"], found["classLabel_probs"][0].tolist()))
            found["classLabel"] = max(found["classLabel_probs"], key=found["classLabel_probs"].get)
        return {name: value.numpy() if hasattr(value, "numpy") else value for name, value in found.items()}


@pytest.fixture
def macos(monkeypatch, in_this_process):
    """Compares as on macOS, with `RunInTorch` as the runtime."""
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(coremltools.models, "MLModel", RunInTorch)


@pytest.mark.parametrize("precision, bound", [("fp32", 1e-6), ("fp16", 1e-2)])
@pytest.mark.usefixtures("macos")
def test_the_program_computes_probabilities_from_pixels(precision, bound, small, tmp_path):
    model, path = small("vilonghornv2_nano", img_size=(64, 104)), tmp_path / "model.mlpackage"
    model.pretrained_cfg = {**model.pretrained_cfg, "label_names": NAMES}
    [(shape, error)] = export(model, "coreml", path, precision)
    assert shape == (1, 3, 64, 104) and error < bound
    model = RunInTorch(str(path))
    kinds = [op.op_type for op in model.operators]
    assert not {"while_loop", "cond", "inverse"} & {*kinds} and kinds.count("classify") == 1
    values = model.run(images=torch.zeros(1, 3, 64, 104))
    assert max(v.dim() for v in values.values() if isinstance(v, torch.Tensor)) == 5  # Core ML has no more
    [image], [label, probabilities] = (getattr(model.get_spec().description, name) for name in ("input", "output"))
    assert (image.name, image.type.imageType.width, image.type.imageType.height) == ("images", 104, 64)
    assert image.type.imageType.colorSpace == image.type.imageType.RGB
    assert (label.name, probabilities.name) == ("classLabel", "classLabel_probs") and values["classLabel"] == NAMES


@pytest.mark.usefixtures("macos")
def test_maps_have_names_and_a_program_that_differs_is_thrown_away(small, tmp_path, monkeypatch):
    model = small("vilonghornv2_nano", features_only=True)
    model.pretrained_cfg = {"architecture": "small", **model.model.pretrained_cfg}
    [(_, error)] = export(model, "coreml", tmp_path / "maps.mlpackage")
    outputs = coremltools.utils.load_spec(str(tmp_path / "maps.mlpackage")).description.output
    assert error < 1e-5 and [output.name for output in outputs] == ["features_0", "features_1"]
    run = RunInTorch.predict
    changed = lambda self, inputs: {name: 2 * value for name, value in run(self, inputs).items()}  # noqa: E731
    monkeypatch.setattr(RunInTorch, "predict", changed)
    with pytest.raises(VerificationError, match="differs from the model by"):
        verify.verify(model, "coreml", tmp_path / "maps.mlpackage", [(1, 3, 32, 32)])


def test_the_command_says_that_nothing_was_run_and_what_a_file_is(tmp_path, monkeypatch, capsys, caplog):
    monkeypatch.chdir(tmp_path)
    name = "vilonghornv2_nano.icons480"
    assert main(["export", name, "--to", "coreml", "--img-size", "32"]) == 0
    out = capsys.readouterr().out
    assert "images 1x3x32x32: differs from the model by" in out
    assert "icons480.mlpackage: Core ML, 2." in out and "not run: its runtime is for macOS and iOS only\n" in out
    assert "checking the file in torch, before its conversion: no runtime here" in caplog.text
    assert [file.name for file in tmp_path.iterdir()] == [f"{name}.mlpackage"]
    assert main(["export", f"{name}.mlpackage"]) == 0
    out = capsys.readouterr().out
    assert "format: Core ML, 2." in out and "needs: macOS 13, iOS 16 or later\n" in out
    assert '"input_size": [3, 32, 32]' in out and json.dumps(["accessibility", "add"])[1:-1] in out
    monkeypatch.setattr(verify, "capture", lambda *_: pytest.fail("work was begun"))
    assert main(["export", name, "--to", "coreml"]) == 2
    assert "mlpackage: exists; remove it or give another name" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["vilonghorn_nano"], "--to coreml is for scans of rule 'longhorn_exact' with heads, as in vilonghornv2_"),
        (["vilonghorn_nano_exact"], "--to coreml is for scans of rule 'longhorn_exact' with heads"),
        (["vilonghornv2_nano", "--precision", "int8"], "precision is 'int8', expected fp32 or fp16 with 'coreml'"),
        (["vilonghornv2_nano", "--img-size", "30"], "30x30 is not a whole number of"),
        (["vilonghornv2_nano", "--output", "a.mlmodel"], "expected a name that ends in .mlpackage"),
    ],
)
def test_bad_input_gets_a_sentence_and_no_work(arguments, sentence, monkeypatch, capsys):
    monkeypatch.setattr(verify, "capture", lambda *_: pytest.fail("work was begun"))
    assert main(["export", *arguments, "--to", "coreml"]) == 2
    assert sentence in capsys.readouterr().err


def test_models_that_core_ml_cannot_show_are_refused(small, tmp_path, monkeypatch, capsys):
    twice = small("vilonghornv2_nano")
    twice.pretrained_cfg = {**twice.pretrained_cfg, "label_names": list("abcda")}
    for model in (twice, small("vilonghornv2_nano", in_chans=4)):
        with pytest.raises(ValueError, match="images in RGB and classes of different names"):
            export(model, "coreml", tmp_path / "model.mlpackage")
    monkeypatch.setitem(sys.modules, "coremltools", None)
    monkeypatch.setattr(command, "export", lambda *_, **__: pytest.fail("work was begun"))
    assert main(["export", "vilonghornv2_nano", "--to", "coreml"]) == 2
    assert "error: Core ML needs coremltools; run: pip install coremltools\n" in capsys.readouterr().err
