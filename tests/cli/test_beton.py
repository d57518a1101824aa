"""The command writes and checks, and answers a user's mistake with one sentence and a status that is not 0."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from vilonghorn.data.beton.__main__ import main


def test_a_folder_becomes_a_file_that_the_check_accepts(folder, tmp_path, capsys):
    path = str(tmp_path / "x.beton")
    assert main([str(folder), path, "--mode", "jpg", "--quiet"]) == 0
    assert "27 images, 3 classes" in capsys.readouterr().out
    assert main(["--check", path]) == 0
    assert "tables and image data" in capsys.readouterr().out
    os.remove(path + ".json")
    assert main(["--check", path]) == 0
    assert "tables only" in capsys.readouterr().out


def test_a_progress_bar_is_shown(folder, tmp_path, capsys):
    assert main([str(folder), str(tmp_path / "x.beton")]) == 0
    assert "writing x.beton: 100%" in capsys.readouterr().err


@pytest.mark.parametrize("case", ["missing", "bad image", "exists", "no folder", "bad mode", "foreign"])
def test_a_mistake_is_one_sentence_on_stderr(case, folder, tmp_path, capsys):
    (tmp_path / "src" / "a").mkdir(parents=True)
    (tmp_path / "src" / "a" / "bad.jpg").write_bytes(b"not a picture")
    (tmp_path / "old.beton").write_bytes(b"old")
    arguments, named = {
        "missing": ([tmp_path / "none", tmp_path / "x.beton"], "none"),
        "bad image": ([tmp_path / "src", tmp_path / "x.beton"], "bad.jpg"),
        "exists": ([folder, tmp_path / "old.beton"], "old.beton"),
        "no folder": ([folder, tmp_path / "deep" / "x.beton"], "deep"),
        "bad mode": ([folder, tmp_path / "x.beton", "--mode", "png"], "mode 'png'"),
        "foreign": (["--check", tmp_path / "old.beton"], "old.beton"),
    }[case]
    assert main([*map(str, arguments), "--quiet"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and named in err and err.count("\n") == 1
    assert (tmp_path / "old.beton").read_bytes() == b"old"
    assert not (tmp_path / "x.beton").exists()


def test_the_limit_of_pixels_is_an_option(folder, tmp_path, capsys):
    arguments = [str(folder), str(tmp_path / "x.beton"), "--quiet", "--max-pixels"]
    assert main([*arguments, "1439"]) == 1
    assert "00.png: 40x36 pixels are more than the limit of 1,439 pixels" in capsys.readouterr().err
    assert main([*arguments, "10000"]) == 0


def test_images_left_out_and_converted_are_told(folder, tmp_path, photo, capsys):
    source = tmp_path / "source"
    (source / "a").mkdir(parents=True)
    photo(0).convert("L").save(source / "a" / "0.png")
    (source / "a" / "1.png").write_bytes(b"")
    assert main([str(source), str(tmp_path / "x.beton"), "--skip-unreadable", "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert "1 images, 1 classes" in out and "converted 1 L; left out 1 (listed in x.beton.json)" in out
    assert err.startswith("left out: ") and "1.png: not a readable image" in err


@pytest.mark.parametrize("arguments", [[], ["src"], ["src", "dst", "--check", "x"]])
def test_other_than_two_paths_or_a_check_shows_the_usage(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "give either SRC and DST, or --check PATH" in capsys.readouterr().err


def test_as_a_module_it_fails_without_a_traceback(tmp_path):
    command = [sys.executable, "-m", "vilonghorn.data.beton", str(tmp_path), str(tmp_path / "x.beton")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and "no class folders" in done.stderr and "Traceback" not in done.stderr
