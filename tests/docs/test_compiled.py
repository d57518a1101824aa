"""The GPU kernels compile without a GPU, keep their states in registers, and issue few instructions per step."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docs" / "performance" / "compiled.py"
spec = importlib.util.spec_from_file_location("compiled", SCRIPT)
compiled = importlib.util.module_from_spec(spec)
spec.loader.exec_module(compiled)

pytestmark = pytest.mark.skipif(compiled.cuobjdump() is None, reason="cuobjdump is not installed")
# Instructions for 32 channels and one step.
CUDA_LIMITS = {
    "forward": dict(longhorn=130, longhorn_exact=120, mamba=165),
    "backward": dict(longhorn=410, longhorn_exact=350, mamba=550),
}
TRITON_LIMITS = dict(forward=250, backward=780)


@pytest.fixture(scope="module")
def compile_kernels(tmp_path_factory):
    """Runs one process per architecture, side by side; returns a function that waits for the rows."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command, folder = [sys.executable, "-W", "ignore", str(SCRIPT)], tmp_path_factory.mktemp("rows")
    processes = {}

    def rows(backend, architecture, *options):
        if (backend, architecture) not in processes:
            for other in compiled.ARCHITECTURES:
                output, errors = ((folder / f"{backend}{other}.{kind}").open("w+") for kind in ("jsonl", "log"))
                arguments = [*command, str(other), "--backend", backend, *options]
                process = subprocess.Popen(arguments, env=environment, stdout=output, stderr=errors)
                processes[backend, other] = process, output, errors
        process, output, errors = processes[backend, architecture]
        status = process.wait()
        errors.seek(0)
        assert status == 0, errors.read()
        output.seek(0)
        return [json.loads(line) for line in output]

    yield rows
    for process, *_ in processes.values():
        process.kill()


def check(row, limit):
    print(row)
    assert row["stack"] == 0 and row["local"] == 0, row
    assert row.get("instructions", 0) <= limit, row


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize("architecture", compiled.ARCHITECTURES)
def test_the_cuda_kernels_spill_nothing_and_issue_few_instructions(architecture, compile_kernels):
    rows = compile_kernels("cuda", architecture)
    # Three rules: forward and backward for three dtypes and for 64 states, summaries for three dtypes, and joins.
    assert len(rows) == 3 * (2 * 4 + 3 + 1)
    assert sum("instructions" in row for row in rows) == 3 * 2 * 3
    for row in rows:
        check(row, CUDA_LIMITS.get(row["kernel"], {}).get(row["rule"], 0))


@pytest.mark.parametrize("architecture", compiled.ARCHITECTURES)
def test_the_triton_kernels_spill_nothing_and_issue_few_instructions(architecture, compile_kernels):
    pytest.importorskip("triton.backends.nvidia")
    rows = compile_kernels("triton", architecture)
    assert len(rows) == 3 * 6  # three rules: forward and backward, with and without a split, summary and join
    for row in rows:
        check(row, TRITON_LIMITS.get(row["kernel"], 0))


def test_loops_are_read_from_branches_that_go_back():
    lines = ["MOV", "FFMA", "@P0 BRA 0x40", "FMUL", "@P1 BRA 0x10", "BRA.DIV ~URZ, 0x0", "@P2 BRA 0x10", "BRA 0x70"]
    kernel = compiled.Kernel({}, [(16 * i, line) for i, line in enumerate(lines)])
    assert kernel.loops() == [range(1, 7)]
