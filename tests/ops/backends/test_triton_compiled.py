"""The Triton kernels of chunks, compiled without a GPU, in a process of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton.backends.nvidia")
SCRIPT = Path(__file__).parents[2] / "helpers" / "compiled_triton.py"
# By kernel and dtype: tokens times channels of a lane in a turn of its loop, the most instructions for each of them,
# the most registers, and the most stack, bytes.
LIMITS = {
    ("chunks_forward", "bfloat16"): (16, 74, 255, 0),
    ("chunks_backward", "bfloat16"): (16, 184, 255, 128),
    ("chunks_forward", "float32"): (8, 312, 255, 0),
    ("chunks_backward", "float32"): (8, 660, 255, 384),
}


def test_the_kernels_spill_little_and_issue_few_instructions(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= dict(TRITON_CACHE_DIR=str(tmp_path), PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
    result = subprocess.run([sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(rows) == 2 * len(LIMITS)
    for row in rows:
        work, instructions, registers, stack = LIMITS[row["name"], row["dtype"]]
        assert row["loop"] / work <= instructions and row["registers"] <= registers, row
        assert row["stack"] <= stack and row["local"] == 0, row
