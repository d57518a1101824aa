"""What torch.compile makes of a training block for a GPU: launches, bytes and memory do not rise."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
GATED = "stages.0.blocks.0"  # of `vilonghornv2_tiny`: a block without a scan
GATED_BF16 = GATED + ", bf16"  # with a residual stream in bfloat16
# Upper limits, reached with torch 2.11 and 2.15: launches, million bytes beside the scan.
LIMITS = {("longhorn", "forward"): (11, 300), ("longhorn", "backward"): (23, 569)}
LIMITS |= {(GATED, "forward"): (8, 696), (GATED, "backward"): (12, 1275)}
LIMITS |= {(GATED_BF16, "forward"): (8, 581), (GATED_BF16, "backward"): (11, 1044)}
KEPT = {"longhorn": 249, GATED: 272, GATED_BF16: 234}  # million bytes that a block keeps for backward
LAUNCH_LIMITS = {"mamba_inner_cuda": 6, "mamba_inner_cuda_backward": 14}  # inside an operator; 8 of them pad a rank
LAUNCH_LIMITS |= {"conv_silu": 1, "conv_silu_backward": 1}


@pytest.fixture(scope="module")
def rows():
    """The lines of block.py, which changes the process that it runs in, for two blocks."""
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("the emulator needs a C++ compiler (g++ or clang++)")
    pytest.importorskip("triton.backends.nvidia")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-W", "ignore", str(FOLDER / "block.py"), *KEPT]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def test_a_training_block_launches_no_more_and_moves_no_more_bytes(rows):
    for row in (row for row in rows if "launches" in row):
        launches, mb = LIMITS[row["block"], row["pass"]]
        assert row["launches"] <= launches and row["mb"] <= mb, row
        for name, count in row["inner"].items():
            assert count <= LAUNCH_LIMITS[name], f"{name} launches {count}"
        assert row["mb"] == pytest.approx(sum(mb for name, mb, _ in row["kernels"] if "scan" not in name), rel=1e-3)


def test_a_training_block_keeps_no_more_for_backward(rows):
    kept = {row["block"]: row["kept_mb"] for row in rows if "kept_mb" in row}
    assert kept.keys() == KEPT.keys() and all(kept[block] <= KEPT[block] for block in kept), kept
