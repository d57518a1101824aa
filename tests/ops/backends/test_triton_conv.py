"""The Triton convolution under Triton's interpreter, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import interpreter
import pytest

pytest.importorskip("triton")
FOLDER = Path(__file__).parents[2] / "helpers"


@interpreter.needed
def test_the_interpreted_kernels_pass_their_tests():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER / "interpreted_conv.py")]
    result = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
