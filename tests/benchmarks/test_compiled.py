"""The GPU kernels compile for sm_90 without a GPU, keep states in registers, and issue few instructions."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import compiled
import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.skipif(compiled.cuobjdump() is None, reason="cuobjdump is not installed")
# Instructions for 32 channels and one step.
CUDA_LIMITS = {
    "forward": dict(longhorn=120, longhorn_exact=110, mamba=160),
    "backward": dict(longhorn=450, longhorn_exact=405, mamba=600),
}


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_the_cuda_kernels_spill_nothing_in_a_step_and_issue_few_instructions():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-W", "ignore", str(FOLDER / "compiled.py"), "90", "--backend", "cuda"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    limited = {(rule, kernel) for kernel, rules in CUDA_LIMITS.items() for rule in rules}
    assert {(row["rule"], row["kernel"]) for row in found} >= limited
    for row in found:
        # With six blocks a multiprocessor, a few values of the loops around the steps do not fit in registers.
        crowded = row["kernel"] == "backward" and row["states"] == 16 and row["rule"] != "mamba"
        assert row["stack"] <= (8 if crowded else 0) and row["local"] == 0, row
        assert row.get("instructions", 0) <= CUDA_LIMITS.get(row["kernel"], {}).get(row["rule"], 0), row
