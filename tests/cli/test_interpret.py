"""`vilonghorn interpret` writes a picture of each kind, or one sentence on why it cannot."""

import errno
import os

import numpy as np
import pytest
from left_run import leave_run, make_image
from PIL import Image

from vilonghorn.cli import main
from vilonghorn.interpret import KINDS


@pytest.fixture
def command(tmp_path):
    """The command on a run's directory and an image."""
    leave_run(tmp_path / "run", depth=3)
    make_image(tmp_path / "a.png", 1)
    return ["interpret", str(tmp_path / "run"), str(tmp_path / "a.png")]


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_writes_a_picture(command, tmp_path, kind, capsys):
    out, options = tmp_path / f"{kind}.png", ["--class", "eel"] if kind == "cam" else []
    assert main([*command, "--what", kind, "--out", str(out), "--blocks", "0", "-2", *options]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{out}: ") and ("the score of eel" in said) == (kind == "cam")
    assert Image.open(out).size[0] > 400 and np.asarray(Image.open(out)).std() > 10  # not an empty page


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--out", "{tmp}/a.jpg"], "expected a name that ends in .png"),
        (["--patch", "4", "0"], "patch 4,0 is not on the image's grid of 4 rows and 4 columns"),
        (["--what", "cam", "--class", "eal"], "has no class 'eal'; "),
        (["--what", "pca", "--patch", "1", "1"], "--patch is for attention and field, not for --what pca"),
        (["--class", "6"], "--class is for cam, not for --what attention"),
        (["--checkpoint", "last"], "there are no weights"),
        (["--max-pixels", "255"], "a.png: too many pixels (16x16 are more than the limit of 255)"),
    ],
)
def test_what_cannot_be_drawn_gets_one_sentence_and_no_file(command, tmp_path, arguments, words, capsys):
    out = [] if "--out" in arguments else ["--out", str(tmp_path / "out.png")]
    before = set(tmp_path.rglob("*"))
    assert main([*command, *out, *(argument.format(tmp=tmp_path) for argument in arguments)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line and set(tmp_path.rglob("*")) == before


def test_a_full_disk_and_other_models_are_named(command, tmp_path, monkeypatch, capsys):
    def full(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    out = ["--out", str(tmp_path / "out.png")]
    monkeypatch.setattr("vilonghorn.cli.interpret.atomic_write", full)
    assert main([*command, *out]) == 2
    err = capsys.readouterr().err
    assert "No space left on device" in err and "resume" not in err
    leave_run(tmp_path / "vit", "vit_tiny_patch16_224", num_heads=2)
    assert main(["interpret", str(tmp_path / "vit"), command[2], *out]) == 2
    assert "VisionTransformer, expected a vilonghorn_*" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*command, *out, "--patch", "3"])
    assert "--patch: expected 2 arguments" in capsys.readouterr().err
