"""What torch.compile makes of a training block for a GPU: launches, bytes and memory do not rise."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "performance"
# Upper limits, reached with torch 2.11 and 2.15: launches, million bytes beside the scan.
LIMITS = {"forward": (9, 300), "backward": (17, 568)}
KEPT = 249  # million bytes that a block keeps for backward
LAUNCH_LIMITS = {"mamba_inner_cuda": 4, "mamba_inner_cuda_backward": 8}  # inside an operator


@pytest.fixture(scope="module")
def rows():
    """The lines of block.py, which changes the process that it runs in, for the rule longhorn."""
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("the emulator needs a C++ compiler (g++ or clang++)")
    pytest.importorskip("triton.backends.nvidia")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-W", "ignore", str(FOLDER / "block.py"), "longhorn"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def test_a_training_block_launches_no_more_and_moves_no_more_bytes(rows):
    for row in (row for row in rows if "launches" in row):
        launches, mb = LIMITS[row["pass"]]
        assert row["launches"] <= launches and row["mb"] <= mb, row
        for name, count in row["inner"].items():
            assert count <= LAUNCH_LIMITS[name], f"{name} launches {count}"
        assert row["mb"] == pytest.approx(sum(mb for name, mb, _ in row["kernels"] if "scan" not in name), rel=1e-3)


def test_a_training_block_keeps_no_more_for_backward(rows):
    [forward] = (row for row in rows if row.get("pass") == "forward" and "kept_mb" in row)
    assert forward["kept_mb"] <= KEPT, forward


def test_the_committed_launches_of_a_scan_are_those_of_the_kernels(rows):
    committed = json.loads((FOLDER / "block.json").read_text())["scans"]
    for row in (row for row in rows if "blocks" in row):
        assert row in committed, "run python docs/performance/block.py --save"
