"""The Triton kernels compile for NVIDIA GPUs on a machine without one, and keep their states in registers."""

import json
import os
import subprocess
import sys

import pytest

from vilonghorn.bench import sass

pytest.importorskip("triton.backends.nvidia")
if sass.cuobjdump() is None:
    pytest.skip("no cuobjdump: neither the CUDA toolkit's nor Triton's", allow_module_level=True)
COMMAND = [sys.executable, "-W", "ignore", "-m", "vilonghorn.bench.compile_triton"]
LIMITS = dict(forward=250, backward=780)  # instructions for 32 channels and a token
ARCHITECTURES = ("80", "90")


@pytest.fixture(scope="module")
def compilations():
    """One process for each architecture: the interpreter, if it is set here, must not be there."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    started = {
        architecture: subprocess.Popen(
            [*COMMAND, architecture],
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for architecture in ARCHITECTURES
    }
    yield started
    for process in started.values():
        process.kill()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_kernels_compile_and_spill_nothing(architecture, compilations):
    output, errors = compilations[architecture].communicate()
    assert compilations[architecture].returncode == 0, errors
    reports = [json.loads(line) for line in output.splitlines()]
    assert len(reports) == 18  # three rules; forward and backward, with and without a split, and the split's own two
    for report in reports:
        print(report)
        assert report["stack"] == 0 and report["local"] == 0, report
        assert report.get("instructions", 0) <= LIMITS.get(report["kernel"], 0), report
