"""Exported files against the model, run by other programs, and what happens to a file that is wrong."""

from __future__ import annotations

import re
from contextlib import nullcontext

import onnx
import onnxruntime
import pytest
import timm
import torch
from torch import nn

from vilonghorn.engine.checkpoint import save_weights
from vilonghorn.export import __main__ as command
from vilonghorn.export import bench as export_bench
from vilonghorn.export import formats as export_formats
from vilonghorn.export import runtime as export_runtime
from vilonghorn.export.__main__ import WrongExport, export, main
from vilonghorn.export.model import build

SMALL = dict(img_size=32, patch_size=8, embed_dim=32, depth=1, num_classes=5)
SIZES = [(1, 3, 32, 32), (3, 3, 16, 64), (7, 3, 40, 24)]  # the export's own comparison is at others


def small(name="vilonghorn_nano", **kwargs):
    torch.manual_seed(0)
    model = timm.create_model(name, dynamic_img_size=True, **{**SMALL, **kwargs})
    return model.eval().requires_grad_(False)


def images(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """What a run leaves of a small model, and that model."""
    path = tmp_path_factory.mktemp("run") / "best.safetensors"
    model = small()
    save_weights(path, model.state_dict(), dict(model="vilonghorn_nano", kwargs=dict(SMALL, drop_path_rate=0.1)))
    return path, model


@pytest.mark.parametrize("name", ["vilonghorn_nano", "vilonghorn_nano_exact", "vim_nano"])
def test_onnxruntime_computes_the_model_for_any_batch_and_size(name, tmp_path):
    model, path = small(name), tmp_path / "model.onnx"
    assert len(export(model, "onnx", path)) == 6
    written = onnx.load(path)
    onnx.checker.check_model(written, full_check=True)
    assert [(entry.domain, entry.version) for entry in written.opset_import] == [("", export_formats.OPSET)]
    assert sum(node.op_type == "Scan" for node in written.graph.node) == 1
    session = onnxruntime.InferenceSession(path)
    assert session.get_inputs()[0].shape == ["batch", 3, "height", "width"]
    for shape in SIZES:
        [actual] = session.run(None, {"images": images(*shape).numpy()})
        torch.testing.assert_close(torch.from_numpy(actual), model(images(*shape)), rtol=0, atol=1e-5)


def test_overlapping_patches_are_exported_for_the_sizes_that_they_fit(tmp_path):
    model, path = small(stride=4), tmp_path / "model.onnx"
    export(model, "onnx", path)
    run = export_runtime.load_onnx(str(path))
    batch = images(2, 3, 20, 36)  # 4 and 8 patches of 8 pixels, 4 apart
    torch.testing.assert_close(run(batch), model(batch), rtol=0, atol=1e-5)


def test_torch_and_machine_code_packages_compute_the_model_without_the_library(tmp_path):
    model = small("vilonghorn_nano_exact")
    for kind in ("pt2", "aoti"):  # `export` runs them where the library cannot be imported, which a test below proves
        path = tmp_path / f"{kind}.pt2"
        assert max(error for _, error in export(model, kind, path)) < 1e-5
        run = export_runtime.LOADERS[kind](str(path))
        for shape in SIZES:
            torch.testing.assert_close(run(images(*shape)), model(images(*shape)), rtol=0, atol=1e-5)


def test_a_file_that_needs_the_library_is_thrown_away(tmp_path, monkeypatch):
    model, copy, folder = small(), tmp_path / "copy.pt2", tmp_path / "exported"
    folder.mkdir()

    def write(program, where):
        torch.export.save(program, where)
        copy.write_bytes(where.read_bytes())

    monkeypatch.setitem(export_formats.WRITERS, "pt2", write)
    monkeypatch.setattr(export_formats, "set_exportable", nullcontext)  # the library's operators stay in the graph
    with pytest.raises(WrongExport, match="does not run without vilonghorn"):
        export(model, "pt2", folder / "model.pt2")
    assert not any(folder.iterdir())
    run = export_runtime.load_pt2(str(copy))  # here, where the library is, the same file runs
    torch.testing.assert_close(run(images(*SIZES[1])), model(images(*SIZES[1])))


def test_a_file_that_computes_something_else_is_thrown_away_and_the_old_one_stays(
    checkpoint, tmp_path, monkeypatch, capsys
):
    path = tmp_path / "model.pt2"
    path.write_text("the old file")

    def write(_, where):
        other = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 5))
        sizes = {0: torch.export.Dim.AUTO, 2: torch.export.Dim.AUTO, 3: torch.export.Dim.AUTO}
        torch.export.save(torch.export.export(other, (torch.zeros(2, 3, 9, 9),), dynamic_shapes=(sizes,)), where)

    monkeypatch.setitem(export_formats.WRITERS, "pt2", write)
    monkeypatch.setattr(command, "capture", lambda _: None)
    assert main(["vilonghorn_nano", "--to", "pt2", "--checkpoint", str(checkpoint[0]), "--output", str(path)]) == 1
    assert re.search(r"differs from the model by \S+ on images .* nothing was written", capsys.readouterr().err)
    assert path.read_text() == "the old file" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("what", [KeyboardInterrupt, OSError])
def test_an_export_that_does_not_come_to_its_end_leaves_nothing(what, checkpoint, tmp_path, monkeypatch):
    def write(_, where):
        where.write_text("half")
        raise what("in the middle")

    monkeypatch.setitem(export_formats.WRITERS, "pt2", write)
    monkeypatch.setattr(command, "capture", lambda _: None)
    argv = [
        "vilonghorn_nano",
        "--to",
        "pt2",
        "--checkpoint",
        str(checkpoint[0]),
        "--output",
        str(tmp_path / "model.pt2"),
    ]
    if what is KeyboardInterrupt:
        assert main(argv) == 130
    else:
        with pytest.raises(OSError, match="in the middle"):
            main(argv)
    assert not any(tmp_path.iterdir())


def test_the_command_exports_what_a_run_left_and_times_it(checkpoint, tmp_path, monkeypatch, capsys):
    path, model = checkpoint
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(export_bench, "ROUNDS", 3)
    assert main(["vilonghorn_nano", "--to", "pt2", "--checkpoint", str(path), "--bench", "1", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("differs from the model by" in line for line in lines) == 6
    assert any("vilonghorn_nano.pt2: torch.export" in line for line in lines)
    for batch in (1, 2):
        found = re.search(rf"batch {batch}: eager ([\d.]+) ms, pt2 ([\d.]+) ms: ([\d.]+) times", "\n".join(lines))
        eager, exported, times = map(float, found.groups())
        assert eager > 0 and times == pytest.approx(exported / eager, rel=0.2, abs=0.1)
    batch = images(2, 3, 32, 48)
    run = export_runtime.load_pt2("vilonghorn_nano.pt2")
    torch.testing.assert_close(run(batch), model(batch), rtol=0, atol=1e-5)


def test_weights_fit_another_image_size_and_a_plain_state_dict_tells_its_classes(checkpoint, tmp_path):
    path, model = checkpoint
    resized = build("vilonghorn_nano", path, [48, 32])
    expected = small()
    expected.set_input_size((48, 32))
    batch = images(2, 3, 48, 32)
    torch.testing.assert_close(resized(batch), expected(batch), rtol=0, atol=1e-6)
    full = timm.create_model("vilonghorn_nano", num_classes=3).eval()
    torch.save(full.state_dict(), tmp_path / "plain.pth")
    loaded = build("vilonghorn_nano", tmp_path / "plain.pth")
    batch = images(1, 3, 224, 224)
    torch.testing.assert_close(loaded(batch), full(batch).detach(), rtol=0, atol=1e-6)


def test_a_difference_is_in_units_of_large_outputs_and_never_finite_for_garbage():
    expected = torch.tensor([[3.0, -10.0]])
    assert command.difference(expected + torch.tensor([[0.0, 0.5]]), expected) == pytest.approx(0.05)
    assert command.difference(expected / 100 + 0.5, expected / 100) == pytest.approx(0.5)
    for garbage in (expected[:, :1], expected * torch.nan, expected / 0.0):
        assert command.difference(garbage, expected) == float("inf")


@pytest.mark.parametrize(
    "argv, sentence",
    [
        (["resnet18"], "resnet18 is not one of this library's models: .*vilonghorn_tiny"),
        (["--img-size", "225"], "225x225 is not a whole number of 16x16 patches"),
        (["--img-size", "16"], "fewer than 2 patches"),
        (["--img-size", "32", "32", "32"], "expected one side, or height and width"),
        (["--output", "model.onnx"], "ends in .pt2"),
        (["--output", "nowhere/model.pt2"], "a folder that exists"),
        (["--checkpoint", "nothing.pth"], "there is no such file"),
        (["--checkpoint", "junk.pth"], "junk.pth is not a checkpoint that timm reads"),
        (["--checkpoint", "other.safetensors"], "holds weights of vim_nano, not of vilonghorn_nano"),
        (["--checkpoint", "nonfinite-0.safetensors"], "holds weights of no model, not of vilonghorn_nano"),
        (["--checkpoint", "other.pth"], "this checkpoint does not fit the model: .*expected"),
        (["--bench", "0"], "at least 1 image"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_bad_input_gets_a_sentence_and_no_work(argv, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "export", lambda *_: pytest.fail("work was begun"))
    (tmp_path / "junk.pth").write_text("no weights")
    other = small("vim_nano")
    save_weights(tmp_path / "other.safetensors", other.state_dict(), dict(model="vim_nano", kwargs=SMALL))
    save_weights(tmp_path / "nonfinite-0.safetensors", {"images": torch.zeros(1)}, {"loss": "nan"})
    torch.save(other.state_dict(), tmp_path / "other.pth")
    name = [] if argv[0] == "resnet18" else ["vilonghorn_nano"]
    with pytest.raises(SystemExit) as ended:
        main([*name, *argv, "--to", "pt2"])
    assert ended.value.code == 2
    assert re.search(sentence, capsys.readouterr().err)


def test_what_is_not_installed_is_named(monkeypatch, capsys):
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None if name == "onnxscript" else name)
    with pytest.raises(SystemExit):
        main(["vilonghorn_nano", "--to", "onnx"])
    assert re.search(
        r"needs onnxscript, not installed here: pip install 'vilonghorn\[export\]'", capsys.readouterr().err
    )
    monkeypatch.setenv("CXX", "/nowhere/c++")
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", ("/nowhere/c++",))
    with pytest.raises(SystemExit):
        main(["vilonghorn_nano", "--to", "aoti"])
    assert "needs a C++ compiler" in capsys.readouterr().err
