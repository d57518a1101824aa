"""The script of a day on a GPU says how it is called, and that there is no GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def run(*arguments):
    command = ["bash", "docs/performance/gpu_day.sh", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | dict(PYTHON=sys.executable), capture_output=True, text=True
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which the stage would occupy for minutes")
def test_a_stage_without_a_gpu_says_so():
    result = run("time")
    assert result.returncode == 3 and "no GPU: torch finds none" in result.stdout, result


def test_an_unknown_stage_is_answered_with_the_known_ones():
    result = run("measure")
    assert result.returncode == 2 and "gpu_day.sh build-check" in result.stdout and "Traceback" not in result.stderr
