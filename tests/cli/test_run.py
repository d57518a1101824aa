"""Scripts that know timm alone run on our models, unedited."""

import subprocess
import sys
from pathlib import Path

import pytest

from vilonghorn.tools import run

ROOT = Path(__file__).parents[2]
SCRIPT = '''
"""What timm's train.py does first."""
import argparse

import timm
import torch
from beside import SIZE

parser = argparse.ArgumentParser()
parser.add_argument("data")
parser.add_argument("--model")
parser.add_argument("--model-kwargs", nargs="*", default=[])


def main():
    args = parser.parse_args()
    kwargs = dict(pair.split("=") for pair in args.model_kwargs)
    model = timm.create_model(args.model, img_size=SIZE, **{key: int(value) for key, value in kwargs.items()})
    print(parser.prog, args.data, tuple(model(torch.zeros(1, 3, SIZE, SIZE)).shape))


if __name__ == "__main__":
    main()
'''


@pytest.fixture
def script(tmp_path):
    (tmp_path / "beside.py").write_text("SIZE = 32\n")
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path / "train.py"


def test_a_script_finds_our_models_its_arguments_and_its_neighbours(script, tmp_path):
    command = [sys.executable, "-m", "vilonghorn", "run", script, "photos", "--model", "vim_nano"]
    command += ["--model-kwargs", "num_classes=3", "depth=1"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "train.py photos (1, 3)\n"), result.stderr


def test_a_script_that_fails_fails(script, monkeypatch):
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(RuntimeError, match="Unknown model"):
        run.main([str(script), "photos", "--model", "vim_gigantic"])


@pytest.mark.parametrize(
    "arguments, status, said", [(["--help"], 0, "SCRIPT"), ([], 2, "usage:"), (["no.py"], 2, "no.py")]
)
def test_without_a_script_the_usage_is_shown(arguments, status, said, capsys):
    with pytest.raises(SystemExit, match=f"^{status}$"):
        run.main(arguments)
    assert said in "".join(capsys.readouterr())
