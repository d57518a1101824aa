"""`vilonghorn beton` writes and checks, and answers a user's mistake with one sentence."""

import os

import pytest
from PIL import Image

from vilonghorn.cli import main


@pytest.fixture
def source(tmp_path):
    """A folder of two classes with four images of 20 x 10 pixels."""
    for i, name in enumerate(("a/0.png", "a/1.png", "b/0.png", "b/1.png")):
        (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 10), (60 * i, 0, 0)).save(tmp_path / "source" / name)
    return tmp_path / "source"


def test_a_folder_becomes_a_file_that_the_check_accepts(source, tmp_path, capsys):
    path = str(tmp_path / "x.beton")
    assert main(["beton", str(source), path, "--mode", "jpg"]) == 0
    out, err = capsys.readouterr()
    assert "4 images, 2 classes" in out and "writing x.beton: 100%" in err
    assert main(["beton", "--check", path]) == 0
    assert "tables and image data" in capsys.readouterr().out
    os.remove(path + ".json")
    assert main(["beton", "--check", path]) == 0
    assert "tables only" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["bad", "x.beton"], "bad.jpg"),
        (["source", "old.beton"], "old.beton"),
        (["source", "deep/x.beton"], "deep"),
        (["source", "x.beton", "--max-pixels", "199"], "0.png: too many pixels (20x10 are more than the limit of 199)"),
        (["--check", "old.beton"], "old.beton"),
    ],
)
def test_a_mistake_is_one_sentence_on_stderr(arguments, words, source, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for folder in ("bad/a", "empty"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "bad/a/bad.jpg").write_bytes(b"not a picture")
    (tmp_path / "old.beton").write_bytes(b"old")
    assert main(["beton", *arguments, "--quiet"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and words in err and err.count("\n") == 1
    assert (tmp_path / "old.beton").read_bytes() == b"old" and not (tmp_path / "x.beton").exists()


def test_images_left_out_are_told(source, tmp_path, capsys):
    (source / "a" / "1.png").write_bytes(b"")
    assert main(["beton", str(source), str(tmp_path / "x.beton"), "--skip-unreadable", "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert "3 images, 2 classes" in out and "written and checked; left out 1 (listed in x.beton.json)" in out
    assert err.startswith("left out: ") and "1.png: not a readable image" in err


@pytest.mark.parametrize("arguments", [[], ["src"], ["src", "dst", "--check", "x"]])
def test_other_than_two_paths_or_a_check_shows_the_usage(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["beton", *arguments])
    assert "give either SRC and DST, or --check PATH" in capsys.readouterr().err
