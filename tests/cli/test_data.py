"""`vilonghorn data digits` writes an image folder once."""

import pytest

from vilonghorn.cli import main
from vilonghorn.data import ImageFolder


def test_digits_are_written_unless_they_are_there(tmp_path, capsys):
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    target = tmp_path / "digits"
    assert main(["data", "digits", str(target)]) == 0
    assert capsys.readouterr().out == f"{target}: 10 classes, 1,442 training and 355 held-out images\n"
    assert len(ImageFolder(target / "val")) == 355
    assert main(["data", "digits", str(target)]) == 0
    assert "already complete, nothing written" in capsys.readouterr().out
    (target / "notes.txt").write_text("mine")
    assert main(["data", "digits", str(target)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"error: {target}: exists and is not the complete set of digits")
