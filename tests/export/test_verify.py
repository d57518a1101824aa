"""A file that is wrong never takes its place."""

import os

import pytest
import torch
from torch import nn

from vilonghorn.export import VerificationError, capture, export, formats, run_exported, verify


@pytest.fixture(scope="module")
def program(small):
    return capture.capture(small())


@pytest.fixture
def captured(program, monkeypatch):
    """Lets `export` take a small model's graph, which was captured once."""
    monkeypatch.setattr(verify, "capture", lambda *_: program)


@pytest.fixture
def write_pt2(monkeypatch):
    """Replaces the writer of pt2 files, and captures nothing: `write_pt2(function)`."""

    def replace(write):
        monkeypatch.setattr(verify, "capture", lambda *_: None)
        monkeypatch.setattr(verify, "compared_shapes", lambda *_: [(1, 3, 32, 32), (2, 3, 32, 32)])
        monkeypatch.setitem(formats.FORMATS, "pt2", formats.FORMATS["pt2"]._replace(write=write))

    return replace


def test_a_file_that_needs_the_library_is_thrown_away(small, images, tmp_path, monkeypatch, write_pt2):
    model, copy, folder = small(), tmp_path / "copy.pt2", tmp_path / "exported"
    folder.mkdir()
    monkeypatch.setattr(capture, "make_exportable", lambda model: model)  # the library's operators stay in the graph
    torch.export.save(capture.capture(model), copy)
    write_pt2(lambda _, path, metadata: path.write_bytes(copy.read_bytes()))
    with pytest.raises(VerificationError, match="does not run without vilonghorn"):
        export(model, "pt2", folder / "model.pt2")
    assert not any(folder.iterdir())
    run = run_exported.load_pt2(copy)  # here, where the library is, the same file runs
    torch.testing.assert_close(run(images(3, 3, 16, 64)), model(images(3, 3, 16, 64)))


def test_a_file_that_computes_something_else_is_thrown_away_and_the_old_one_stays(small, tmp_path, write_pt2):
    def write(_, path, metadata):
        other = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 5))
        sizes = {0: torch.export.Dim.AUTO, 2: torch.export.Dim.AUTO, 3: torch.export.Dim.AUTO}
        torch.export.save(torch.export.export(other, (torch.zeros(2, 3, 9, 9),), dynamic_shapes=(sizes,)), path)

    path = tmp_path / "model.pt2"
    path.write_text("the old file")
    write_pt2(write)
    with pytest.raises(VerificationError, match=r"differs from the model by \S+ on images of shape"):
        export(small(), "pt2", path)
    assert path.read_text() == "the old file" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("kind", ["onnx", "pt2"])
@pytest.mark.usefixtures("captured")
def test_a_name_that_is_not_utf8_is_written_and_read(kind, small, images, tmp_path):
    folder = tmp_path / os.fsdecode(b"caf\xe9")  # as any other than ASCII in an ASCII locale
    folder.mkdir()
    path = folder / os.fsdecode(b"mod\xe8le" + formats.FORMATS[kind].suffix.encode())
    model = small()
    assert len(export(model, kind, path)) == 6 and list(folder.iterdir()) == [path]
    torch.testing.assert_close(formats.FORMATS[kind].load(path)(images(2, 3, 32, 32)), model(images(2, 3, 32, 32)))


@pytest.mark.parametrize("kind", ["onnx", "pt2"])
@pytest.mark.usefixtures("captured")
def test_a_full_disk_is_named_and_keeps_no_part(kind, small, tmp_path):
    path = tmp_path / f"model{formats.FORMATS[kind].suffix}"
    (tmp_path / f"{path.name}.{os.getpid()}.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match=f"no space left for {path}: free some space, then export again"):
        export(small(), kind, path)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "kind, weights, sentence",
    [("foo", "fp32", "kind is 'foo'"), ("ort", "int4", "is 'int4'"), ("ort", "int8", "head.bias contains NaN")],
)
def test_bad_arguments_are_named(kind, weights, sentence, small, tmp_path):
    model = small()
    model.head.bias[0] = torch.nan
    with pytest.raises(ValueError, match=sentence):
        export(model, kind, tmp_path / "model", weights)


@pytest.mark.parametrize("kind", ["onnx", "ort", "pt2", "openvino"])
def test_a_file_that_cannot_be_written_is_refused_before_the_capture(kind, small, tmp_path, monkeypatch):
    monkeypatch.setattr(verify, "capture", lambda *_: pytest.fail("work was begun"))
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="file/model"):
        export(small(), kind, tmp_path / "file" / f"model{formats.FORMATS[kind].suffix}")


def test_an_export_inside_autocast_is_refused(small, tmp_path):
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="autocast is on.* call export outside"):
        export(small(), "pt2", tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())


def test_an_error_is_relative_to_large_outputs_and_infinite_for_garbage():
    expected = torch.tensor([[3.0, -10.0]])
    assert verify.max_error(expected + torch.tensor([[0.0, 0.5]]), expected) == pytest.approx(0.05)
    assert verify.max_error(expected / 100 + 0.5, expected / 100) == pytest.approx(0.5)
    for garbage in (expected[:, :1], expected * torch.nan, expected / 0.0):
        assert verify.max_error(garbage, expected) == float("inf")


def test_a_model_of_one_size_needs_a_file_of_one_size(small, tmp_path):
    model, path = small(dynamic_img_size=False), tmp_path / "model.onnx"
    with pytest.raises(ValueError, match="of its own size only.*: make it with dynamic_img_size=True, or give fixed"):
        export(model, "onnx", path)
    assert [shape for shape, _ in export(model, "onnx", path, fixed=True)] == [(1, 3, 32, 32)]
