"""The Triton convolution under Triton's interpreter, in a process of its own, and compiled without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import interpreter
import pytest

pytest.importorskip("triton.backends.nvidia")
FOLDER = Path(__file__).parents[1]


@interpreter.needed
def test_the_interpreted_kernels_pass_their_tests():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER / "interpreted_conv.py")]
    result = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_kernels_spill_nothing_and_issue_few_instructions(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= dict(TRITON_CACHE_DIR=str(tmp_path), PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
    command = [sys.executable, str(FOLDER / "compiled_conv.py")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(rows) == 4
    for row in rows:
        assert row["stack"] == row["local"] == 0 and row["registers"] <= 136, row
        # A turn of the loop is four tokens of four channels of a lane, in backward of two.
        per_channel = row["loop"] / {"conv_forward": 16, "conv_backward": 8}[row["name"]]
        assert per_channel <= {"conv_forward": 48, "conv_backward": 95}[row["name"]], row
