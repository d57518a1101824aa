"""`vilonghorn export FILE` says what a file is. Nothing in the file is executed."""

import io
import os
import pickle
import re
import zipfile

import onnxruntime
import pytest
import torch

from vilonghorn.cli import main
from vilonghorn.export import capture, formats


@pytest.fixture(scope="module")
def files(small, tmp_path_factory):
    """A file of each format that needs no library, by its name."""
    folder, model = tmp_path_factory.mktemp("files"), small()
    model.pretrained_cfg = {**model.pretrained_cfg, "label_names": [f"{i} \x1b[31m" for i in range(5)]}
    for kind in ("onnx", "pt2"):
        path = folder / f"model{formats.FORMATS[kind].suffix}"
        formats.FORMATS[kind].write(capture.capture(model), path, capture.describe(model))
    return folder


@pytest.mark.parametrize("kind", ["onnx", "pt2"])
def test_a_summary_has_the_format_the_classes_the_size_and_the_preprocessing(kind, files, monkeypatch, capsys):
    for owner, name in ((torch.export, "load"), (torch, "load"), (pickle, "Unpickler")):
        monkeypatch.setattr(owner, name, lambda *_, **__: pytest.fail("the file was loaded"))
    monkeypatch.setattr(onnxruntime, "InferenceSession", lambda *_: pytest.fail("the file was loaded"))
    assert main(["export", str(files / f"model{formats.FORMATS[kind].suffix}")]) == 0
    out = capsys.readouterr().out
    assert f"format: {formats.FORMATS[kind].title}, " in out and f"needs: {formats.FORMATS[kind].needs}\n" in out
    assert 'model: "vilonghorn_nano"\n' in out and 'classes: ["0 \\u001b[31m", ' in out
    assert '"input_size": [3, 32, 32]' in out and '"interpolation": "bicubic"' in out
    assert 'weights: "fp32"' in out and ("opset: 18" in out) == (kind == "onnx")


class Trap:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


def test_a_pickle_in_a_file_is_not_executed(files, tmp_path):
    buffer = io.BytesIO()
    torch.save(Trap(tmp_path / "sprung"), buffer)
    with zipfile.ZipFile(files / "model.pt2") as whole, zipfile.ZipFile(tmp_path / "trap.pt2", "w") as changed:
        for name in whole.namelist():
            changed.writestr(name, buffer.getvalue() if name.endswith("weight_0") else whole.read(name))
    assert main(["export", str(tmp_path / "trap.pt2")]) == 0
    assert not (tmp_path / "sprung").exists()


def test_another_file_is_refused_in_a_sentence(files, tmp_path, capsys):
    (tmp_path / "empty.onnx").write_bytes(b"")
    (tmp_path / "junk.onnx").write_bytes(b"no graph")
    (tmp_path / "part.pt2").write_bytes((files / "model.pt2").read_bytes()[:1000])
    (tmp_path / "notes.txt").write_text("")
    for name, sentence in (
        ("empty.onnx", "empty.onnx was not written by vilonghorn export, or is damaged"),
        ("junk.onnx", "junk.onnx was not written by"),
        ("part.pt2", "part.pt2 was not written by vilonghorn export, or is damaged: File is not a zip file"),
        ("notes.txt", "is not an exported file, expected a name that ends in one of .onnx, .ort.onnx, .pt2"),
        ("nothing.onnx", "--to is missing, and there is no exported file .*nothing.onnx"),
    ):
        assert main(["export", str(tmp_path / name)]) == 2
        assert re.search(sentence, capsys.readouterr().err)
