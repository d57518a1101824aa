"""The Triton kernels compile for NVIDIA GPUs on a machine without one, and keep their states in registers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

nvidia = pytest.importorskip("triton.backends.nvidia")
if not Path(nvidia.__file__ or nvidia.__path__[0]).parent.joinpath("bin", "cuobjdump").exists():
    pytest.skip("this Triton comes without cuobjdump", allow_module_level=True)
SCRIPT = Path(__file__).with_name("compile_triton.py")
ARCHITECTURES = ("80", "90")


@pytest.fixture(scope="module")
def compilations():
    """One process for each architecture: the interpreter, if it is set here, must not be there."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    started = {
        architecture: subprocess.Popen(
            [sys.executable, "-W", "ignore", str(SCRIPT), architecture],
            env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for architecture in ARCHITECTURES
    }  # fmt: skip
    yield started
    for process in started.values():
        process.kill()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_kernels_compile_and_spill_nothing(architecture, compilations):
    output, errors = compilations[architecture].communicate()
    assert compilations[architecture].returncode == 0, errors
    reports = [json.loads(line) for line in output.splitlines()]
    assert len(reports) == 15  # three rules; forward and backward, with and without a split, and the split's summary
    for report in reports:
        print(report)
        assert report["stack"] == 0 and report["local"] == 0, report
