"""Every Triton kernel compiles without a GPU, for each kind of GPU, by the installed version of Triton."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton.backends.nvidia")
SCRIPT = Path(__file__).parents[2] / "helpers" / "compiled_triton.py"
TARGETS = ("sm_80", "sm_90", "sm_120", "gfx942")
# Of NVIDIA's kernels, by name and dtype: the most instructions of their longest loop, and the most stack, bytes. Triton
# 3.8 stays within them, and what was compiled with 3.6 and 3.9.
LIMITS = {
    ("scan_forward", "bfloat16"): (400, 0),
    ("scan_backward", "bfloat16"): (3600, 112),
    ("chunks_forward", "bfloat16"): (1200, 0),
    ("chunks_backward", "bfloat16"): (3000, 384),
    ("sum_shares", "bfloat16"): (200, 0),
    ("sum_shares", "float32"): (200, 0),
    ("chunks_forward", "float32"): (2600, 0),
    ("chunks_backward", "float32"): (5300, 400),
}


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """One for two targets, side by side."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    started = {}
    for targets in (TARGETS[:2], TARGETS[2:]):
        environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
        command = [sys.executable, str(SCRIPT), *targets]
        started[targets] = subprocess.Popen(
            command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    yield started
    for process in started.values():
        process.kill()


def test_every_kernel_compiles_and_spills_little(processes):
    for targets, process in processes.items():
        output, errors = process.communicate()
        assert process.returncode == 0, errors
        rows = [json.loads(line) for line in output.splitlines()]
        assert len(rows) == len(targets) * 3 * 5  # forward, backward, sums: three rules, and heads in two dtypes
        for row in rows:
            loop, stack = LIMITS[row["name"], row["dtype"]]
            assert row.get("loop", 0) <= loop and row.get("stack", 0) <= stack and not row.get("local"), row
