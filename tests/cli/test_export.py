"""`vilonghorn export` exports what a run left, and refuses bad input before work starts."""

import json
import re
import sys

import pytest
import timm
import torch
from left_run import NAMES, leave_run

from vilonghorn.cli import export as command
from vilonghorn.cli import main
from vilonghorn.engine.checkpoint import save_weights
from vilonghorn.export import load_for_export, run_exported

RANDOM = ["export", "vilonghorn_nano", "--img-size", "32"]


def test_the_command_exports_what_a_run_left(tmp_path, monkeypatch, capsys, caplog):
    leave_run(tmp_path / "runs/pets", depth=1)
    monkeypatch.chdir(tmp_path)
    model, classes = load_for_export("runs/pets"), {"classes": ""}
    assert main(["export", "runs/pets", "--to", "pt2"]) == 0
    out = capsys.readouterr().out
    assert out.count("differs from the model by") == 6 and "pets.pt2: torch.export" in out
    steps = [record.getMessage().split()[0] for record in caplog.records if record.name.startswith("vilonghorn")]
    assert steps == ["capturing", "writing", "checking"]
    assert (tmp_path / "pets.py").is_file() and out.endswith("with it: python pets.py IMAGE...\n")
    torch.export.load("pets.pt2", extra_files=classes)
    assert json.loads(classes["classes"]) == NAMES
    run = run_exported.load_pt2("pets.pt2")
    for shape in [(1, 3, 32, 32), (3, 3, 16, 64), (7, 3, 40, 24)]:
        images = torch.randn(shape)
        torch.testing.assert_close(run(images), model(images), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "error, status, sentence",
    [
        (command.VerificationError("it differs"), 1, "it differs; nothing was written"),
        (OSError("no space left"), 2, "error: no space left"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_a_failed_export_is_reported(error, status, sentence, monkeypatch, capsys):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(command, "export", fail)
    assert main([*RANDOM, "--to", "pt2"]) == status
    assert capsys.readouterr().err == sentence + "\n"


@pytest.mark.parametrize(
    "argv, sentence",
    [
        (
            ["resnet18"],
            "resnet18 is neither the directory of a run nor one of this library's models: .*vilonghorn_tiny",
        ),
        (["--img-size", "225"], "225x225 is not a whole number of 16x16 patches"),
        (["--img-size", "16"], "fewer than 2 patches .*: give a larger --img-size"),
        (["--img-size", "32", "32", "32"], "expected one side, or height and width"),
        (["--output", "model.onnx"], "ends in .pt2"),
        (["--output", "model.ort.onnx"], "ends in .pt2 \\(.ort.onnx is for --to ort\\)"),
        (["--output", "nowhere/model.pt2"], "a folder that exists"),
        (["--examples", "a.png"], "--examples is for --to web"),
        (["--checkpoint", "other.safetensors"], "contains weights of vim_nano, not of vilonghorn_nano"),
        (["--checkpoint", "other.pth"], "this checkpoint does not fit the model: .*expected"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_bad_input_gets_a_sentence_and_no_work(argv, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "export", lambda *_, **__: pytest.fail("work was begun"))
    state = timm.create_model("vim_nano", img_size=32, depth=1, num_classes=5).state_dict()
    save_weights(tmp_path / "other.safetensors", state, dict(model="vim_nano", kwargs={}))
    torch.save(state, tmp_path / "other.pth")
    name = [] if argv[0] == "resnet18" else ["vilonghorn_nano"]
    assert main(["export", *name, *argv, "--to", "pt2"]) == 2
    assert re.search(sentence, capsys.readouterr().err)


def test_what_is_not_installed_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    assert main([*RANDOM, "--to", "onnx"]) == 2
    assert "error: ONNX needs onnxscript; run: pip install onnx onnxscript onnxruntime\n" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([*RANDOM, "--to", "aoti"])
    assert re.search("invalid choice: 'aoti' .*ort'?, '?pt2", capsys.readouterr().err)
