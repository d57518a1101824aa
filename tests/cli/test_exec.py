"""Scripts that know timm alone run on our models, unedited."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from vilonghorn.cli import main

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

if __name__ == "__main__":
    args = parser.parse_args()
    kwargs = dict(pair.split("=") for pair in args.model_kwargs)
    model = timm.create_model(args.model, img_size=SIZE, **{key: int(value) for key, value in kwargs.items()})
    print(parser.prog, args.data, tuple(model(torch.zeros(1, 3, SIZE, SIZE)).shape))
    raise ValueError("of the script")
'''


def test_a_script_finds_our_models_its_arguments_and_its_neighbours_and_its_errors_pass(tmp_path):
    (tmp_path / "beside.py").write_text("SIZE = 32\n")
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "vilonghorn", "exec", tmp_path / "train.py", "photos", "--model", "vim_nano"]
    command += ["--model-kwargs", "num_classes=3", "depth=1"]
    result = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert result.stdout == "train.py photos (1, 3)\n", result.stderr
    assert result.returncode == 1 and "Traceback" in result.stderr and result.stderr.endswith("of the script\n")


@pytest.mark.parametrize("arguments, words", [([], "SCRIPT, ...; see"), (["no.py"], "there is no script no.py")])
def test_without_a_script_one_line_says_where_the_usage_is(arguments, words, capsys):
    with pytest.raises(SystemExit, match="^2$"):
        main(["exec", *arguments])
    err = capsys.readouterr().err
    assert words in err and err.endswith("; see vilonghorn exec --help\n") and err.count("\n") == 1


def test_a_script_of_another_package_runs_unchanged_and_the_log_names_what_is_changed(tmp_path):
    (tmp_path / "causal_conv1d.py").write_text("kept = True\n")
    script = """
        import causal_conv1d, selective_scan_cuda_oflex, torch
        from mamba_ssm.ops.selective_scan_interface import selective_scan_fn
        with torch.cuda.device(torch.zeros(1).device):
            y = selective_scan_fn(*[torch.ones(1, 2, 3)] * 2, -torch.ones(2, 1), *[torch.ones(1, 1, 3)] * 2)
        print(tuple(y.shape), causal_conv1d.kept)
    """
    (tmp_path / "model.py").write_text(textwrap.dedent(script))
    command = [sys.executable, "-m", "vilonghorn", "exec", tmp_path / "model.py"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(command, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True)
    assert result.returncode == 0 and result.stdout == "(1, 2, 3) True\n", result.stderr
    assert "causal_conv1d is installed and kept" in result.stderr
    assert "torch.cuda.device does nothing" in result.stderr
