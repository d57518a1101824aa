"""`--check` reads a file without loading it: nothing in it is executed, and damage is seen."""

import io
import os
import pickle
import random
import re
import zipfile

import onnx
import onnxruntime
import pytest
import torch

from vilonghorn.cli import main
from vilonghorn.export import formats
from vilonghorn.export.contents import read_contents

FAKE = {
    "m/data/aotinductor/model/a.wrapper.so": b"machine code",
    "m/data/aotinductor/model/vilonghorn.kernels": b"more",
}


@pytest.fixture(scope="module")
def files(small, tmp_path_factory):
    """A file of each format by its name; that of AOTInductor has no real code."""
    folder, model = tmp_path_factory.mktemp("files"), small()
    found = {kind: folder / f"model{form.suffix}" for kind, form in formats.FORMATS.items()}
    for kind in ("onnx", "pt2"):
        formats.FORMATS[kind].write(formats.capture(model), found[kind], formats.describe(model))
    write_zip(found["aoti"], FAKE)
    return found


def write_zip(path, members, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def members_of(path):
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture
def unloadable(monkeypatch):
    """Fails if anything loads a file."""

    def fail(*args, **kwargs):
        pytest.fail("the file was loaded")

    for owner, name in ((torch.export, "load"), (torch._inductor, "aoti_load_package"), (torch, "load")):
        monkeypatch.setattr(owner, name, fail)
    monkeypatch.setattr(onnxruntime, "InferenceSession", fail)
    monkeypatch.setattr(pickle, "Unpickler", fail)


def test_a_check_loads_nothing_unless_it_is_asked_to_run(files, unloadable, capsys):
    for kind in ("onnx", "pt2", "aoti"):
        assert main(["export", "--check", str(files[kind])]) == 0
        out = capsys.readouterr().out
        assert out.endswith(
            "nothing was loaded; --run loads and runs the file: only for a file whose author you trust\n"
        )
        assert kind == "aoti" or "model vilonghorn_nano, no names of classes, weights fp32" in out
    assert main(["export", "vilonghorn_nano", "--to", "onnx", "--run"]) == 2


def test_a_check_that_is_asked_runs_the_file(files, capsys):
    for kind in ("onnx", "pt2"):
        assert main(["export", "--check", str(files[kind]), "--run"]) == 0
        assert capsys.readouterr().out.endswith("it runs here: output (1, 5)\n")
    assert main(["export", "--check", str(files["aoti"]), "--run"]) == 1
    assert "it does not run here: " in capsys.readouterr().out


class Trap:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


@pytest.mark.parametrize("member", ["sample_inputs/model.pt", "weights/weight_0"])
def test_a_pickle_in_a_file_is_not_executed(member, files, tmp_path):
    members, buffer = members_of(files["pt2"]), io.BytesIO()
    torch.save(Trap(tmp_path / "sprung"), buffer)
    [name] = [name for name in members if name.endswith(member)]
    path = write_zip(tmp_path / "trap.pt2", members | {name: buffer.getvalue()})
    assert main(["export", "--check", str(path)]) == 0
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("kind", ["onnx", "pt2"])
def test_a_flipped_bit_in_the_weights_is_damage(kind, files, small, tmp_path):
    data = bytearray(files[kind].read_bytes())
    start = data.index(small().head.weight.numpy().tobytes())
    for offset in random.Random(0).sample(range(start, start + 5 * 32 * 4), 10):
        changed = bytearray(data)
        changed[offset] ^= 1 << offset % 8
        path = tmp_path / files[kind].name
        path.write_bytes(changed)
        with pytest.raises(ValueError, match=f"{path} is damaged: .*checksum"):
            read_contents(path)


def test_what_no_export_writes_is_refused(files, tmp_path, capsys):
    outside = onnx.load(files["onnx"])
    weight = outside.graph.initializer[0]
    weight.ClearField("raw_data")
    weight.data_location = onnx.TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="../secret\x1b[31m")
    (tmp_path / "outside.onnx").write_bytes(outside.SerializeToString())
    whole = members_of(files["pt2"])
    write_zip(tmp_path / "small.pt2", whole, zipfile.ZIP_DEFLATED)
    write_zip(tmp_path / "code.pt2", whole | {"archive/data/aotinductor/model/a.so": b""})
    write_zip(tmp_path / "nothing.aoti.pt2", {"a": b""})
    write_zip(tmp_path / "words.pt2", whole | {"archive/extra/classes": b"cat, dog"})
    for name in ("junk.onnx", "junk.pt2"):
        (tmp_path / name).write_bytes(b"no graph")
    os.mkfifo(tmp_path / "pipe.pt2")
    for name, sentence in (
        ("outside.onnx", r"has values in another file, ../secret\\x1b\[31m, expected one file"),
        ("small.pt2", "has compressed or repeated members"),
        ("code.pt2", "contains machine code .archive/data/aotinductor/model/a.so., expected none in torch.export"),
        ("nothing.aoti.pt2", "is not of the format AOTInductor .no member that ends in .so"),
        ("words.pt2", "is not of the format torch.export, or is damaged .Expecting value"),
        ("junk.onnx", "is not of the format ONNX"),
        ("junk.pt2", "is not of the format torch.export, or is damaged .File is not a zip file"),
        ("junk.txt", "ends in one of .onnx, .ort.onnx, .pt2, .aoti.pt2"),
        ("pipe.pt2", "there is no such file"),
    ):
        assert main(["export", "--check", str(tmp_path / name), "--run"]) == 2
        assert re.search(sentence, capsys.readouterr().err)


@pytest.mark.parametrize("kind", ["onnx", "pt2", "aoti"])
def test_a_changed_file_is_read_or_refused_in_a_sentence(kind, files, tmp_path):
    data, rng, path = files[kind].read_bytes(), random.Random(0), tmp_path / files[kind].name
    ends = [*range(200), *range(len(data) - min(len(data), 3000), len(data))]  # headers and directory
    for _ in range(150):
        changed = bytearray(data)
        for _ in range(rng.choice([1, 5, 50])):
            changed[rng.choice(ends) % len(data)] = rng.randrange(256)
        path.write_bytes(changed[: rng.choice([len(data)] * 3 + [rng.randrange(len(data))])])
        try:
            read_contents(path)
        except ValueError as error:
            assert str(path) in str(error)


@pytest.mark.parametrize("suffix", [".onnx", ".ort.onnx"])
def test_an_empty_file_is_no_model(suffix, tmp_path, capsys):
    (tmp_path / f"x{suffix}").write_bytes(b"")  # which is a message of ONNX without fields
    assert main(["export", "--check", str(tmp_path / f"x{suffix}")]) == 2
    assert "has no operators, expected a model" in capsys.readouterr().err
