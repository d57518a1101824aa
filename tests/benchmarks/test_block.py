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
SCAN_BF16 = "stages.2.blocks.0, bf16"  # with a scan and an MLP
# Upper limits, reached with torch 2.14: launches, million bytes beside the scan.
LIMITS = {("longhorn", "forward"): (11, 300), ("longhorn", "backward"): (22, 539)}
LIMITS |= {(GATED, "forward"): (6, 617), (GATED, "backward"): (9, 964)}
LIMITS |= {(GATED_BF16, "forward"): (5, 424), (GATED_BF16, "backward"): (8, 694)}
LIMITS |= {(SCAN_BF16, "forward"): (16, 251), (SCAN_BF16, "backward"): (27, 444)}
KEPT = {"longhorn": 249, GATED: 232, GATED_BF16: 193, SCAN_BF16: 162}  # million bytes that a block keeps for backward
# Inside the operator of a mixer. With a scan, 8 pad a rank. Backward, one sums the weights' gradients.
LAUNCH_LIMITS = {("longhorn", "forward"): 6, ("longhorn", "backward"): 14}
LAUNCH_LIMITS |= {(SCAN_BF16, "forward"): 7, (SCAN_BF16, "backward"): 13}
LAUNCH_LIMITS |= {(block, "forward"): 1 for block in (GATED, GATED_BF16)}
LAUNCH_LIMITS |= {(block, "backward"): 2 for block in (GATED, GATED_BF16)}


@pytest.fixture(scope="module")
def rows():
    """The lines of block.py, which changes the process that it runs in, for the blocks of `KEPT`."""
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
        suffix = "_backward" if row["pass"] == "backward" else ""
        assert row["launches"] <= launches and row["mb"] <= mb, row
        norm, mixer = (row["inner"].pop(name, 0) for name in ("residual_norm_backward", f"mamba_inner_cuda{suffix}"))
        assert norm <= 2 and 0 < mixer <= LAUNCH_LIMITS[row["block"], row["pass"]] and not row["inner"], row
        assert row["mb"] == pytest.approx(sum(mb for name, mb, _ in row["kernels"] if "scan" not in name), rel=1e-3)


def test_a_training_block_keeps_no_more_for_backward(rows):
    kept = {row["block"]: row["kept_mb"] for row in rows if "kept_mb" in row}
    assert kept.keys() == KEPT.keys() and all(kept[block] <= KEPT[block] for block in kept), kept
