"""Models that another package registers with timm: `run.imports`, from training to an exported file."""

import json
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from timm.models import _registry

from vilonghorn import compat
from vilonghorn.cli import main
from vilonghorn.engine import load_config
from vilonghorn.engine.tasks.distillation import Teacher

# As public code writes it: mamba_ssm's names, and old names of timm.
PACKAGE = """
import torch
from mamba_ssm.ops.selective_scan_interface import selective_scan_fn
from timm.models.layers import trunc_normal_
from timm.models.registry import register_model

class Other(torch.nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.num_classes, self.default_cfg = num_classes, dict(input_size=(3, 16, 16))
        self.stem, self.head = torch.nn.Conv2d(3, 8, 4, 4), torch.nn.Linear(8, num_classes)
        self.A = torch.nn.Parameter(-torch.ones(8, 2))
        trunc_normal_(self.head.weight)

    def forward(self, x):
        x = self.stem(x).flatten(2)
        return self.head(selective_scan_fn(x, x, self.A, x[:, :2], x[:, 2:4], delta_softplus=True).mean(2))

@register_model
def other_vision_model(pretrained=False, num_classes=1000, **kwargs):
    return Other(num_classes)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "othervision.py").write_text(PACKAGE)
    for split in ("train", "val"):
        for label, name in enumerate(("dark", "light")):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(4):
                pixels = np.random.default_rng([i, split == "val"]).integers(0, 60, (16, 16, 3)) + 180 * label
                Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / split / name / f"{i}.png")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    compat.uninstall()
    sys.modules.pop("othervision", None)


def test_a_model_of_another_package_is_trained_evaluated_used_and_exported(folder, capsys, monkeypatch):
    run, image = str(folder / "run"), str(folder / "val" / "light" / "0.png")
    options = "--model.name other_vision_model --run.imports [othervision] --data.image_size 16 --data.batch_size 4"
    options += " --schedule.epochs 2 --schedule.warmup_epochs 0 --model.drop_path null --run.device cpu"
    data = ["--data.train", str(folder / "train"), "--data.val", str(folder / "val"), "--run.dir", run]
    main(["train", *options.split(), *data])
    main(["evaluate", run])
    capsys.readouterr()
    main(["predict", run, image, "--json"])
    [row] = json.loads(capsys.readouterr().out.strip().splitlines()[-1])["predictions"][:1]
    assert row["name"] in ("dark", "light")
    main(["export", run, "--to", "onnx", "--output", str(folder / "other.onnx")])
    assert (folder / "other.onnx").stat().st_size > 1000  # checked against the model before it was written
    for kind, reason in (("ort", "kind is 'ort', which is for models of this library"), ("web", "--to web is for")):
        assert main(["export", run, "--to", kind, "--output", str(folder / f"other.{kind}.onnx")]) != 0
        assert reason in capsys.readouterr().err
    assert main(["export", run, "--to", "onnx", "--img-size", "32", "--output", str(folder / "x.onnx")]) == 2
    assert "other_vision_model of another package: leave out --img-size" in capsys.readouterr().err
    monkeypatch.delitem(_registry._model_entrypoints, "other_vision_model")  # as in a new process
    del sys.modules["othervision"]
    teacher = Teacher(run, load_config("digits"), 2, torch.device("cpu"), ["light", "dark"])
    assert teacher.size == (16, 16) and teacher.order == [1, 0]


def test_a_module_that_cannot_be_imported_is_named(folder, capsys):
    (folder / "broken.py").write_text("import no_such_module_anywhere")
    assert main(["train", "--run.imports", "[broken]", "--data.train", str(folder), "--run.dir", f"{folder}/run"]) == 2
    message = capsys.readouterr().err
    assert "run.imports: 'broken' cannot be imported" in message and "no_such_module_anywhere" in message
    assert not (folder / "run").exists()
