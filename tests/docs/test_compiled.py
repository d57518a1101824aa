"""The GPU kernels compile for sm_90 without a GPU, keep states in registers, and issue few instructions."""

import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "performance"
sys.path.append(str(FOLDER))
import compiled  # noqa: E402
import predict  # noqa: E402
import stalls  # noqa: E402

pytestmark = pytest.mark.skipif(compiled.cuobjdump() is None, reason="cuobjdump is not installed")
# Instructions for 32 channels and one step.
CUDA_LIMITS = {
    "forward": dict(longhorn=120, longhorn_exact=110, mamba=160),
    "backward": dict(longhorn=445, longhorn_exact=405, mamba=600),
}
# Microseconds of both directions for 128 images of vilonghorn_tiny on an H200, by the model of predict.py.
MODELLED_LIMITS = {
    ("longhorn", "forward"): 85,
    ("longhorn", "backward"): 375,
    ("longhorn_exact", "forward"): 86,
    ("longhorn_exact", "backward"): 375,
}
TRITON_LIMITS = dict(forward=260, backward=790)  # with Triton 3.8; 3.9 needs a twentieth less
TRITON_36_LIMITS = dict(forward=340, backward=990)  # of the compiler of Triton 3.6
TRITON_STACK = {"3.6": 160, "3.8": 64}  # bytes that compilers of Triton spill in backward; 3.9 spills nothing


@pytest.fixture(scope="module")
def rows():
    """The rows of compiled.py for a backend; it changes the process that it runs in. Both backends compile at once."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-W", "ignore", str(FOLDER / "compiled.py"), "90", "--backend"]
    options = dict(env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    started = {name: subprocess.Popen([*command, name], **options) for name in ("cuda", "triton")}

    def read(backend):
        out, errors = started[backend].communicate()
        assert started[backend].returncode == 0, errors
        return [json.loads(line) for line in out.splitlines()]

    yield read
    for process in started.values():
        process.kill()
        process.wait()


def check(row, limit, stack=0):
    assert row["stack"] <= stack and row["local"] == 0, row
    assert row.get("instructions", 0) <= limit, row


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_the_cuda_kernels_spill_nothing_in_a_step_and_their_modelled_time_does_not_rise(rows):
    found = rows("cuda")
    assert {(row["rule"], row["kernel"]) for row in found} >= MODELLED_LIMITS.keys()
    for row in found:
        # With six blocks a multiprocessor, a few values of the loops around the steps do not fit in registers.
        crowded = row["kernel"] == "backward" and row["states"] == 16 and row["rule"] != "mamba"
        check(row, CUDA_LIMITS.get(row["kernel"], {}).get(row["rule"], 0), 24 if crowded else 0)
    sizes = dict(batch=128, tokens=197, channels=384)
    launches = json.loads((FOLDER / "block.json").read_text())["scans"]
    kernels = {(row["rule"], row["kernel"]): row for row in found if "cycles" in row}
    for (rule, kernel), limit in MODELLED_LIMITS.items():
        expected = sizes | {"rule": rule, "pass": kernel}
        [launch] = (launch for launch in launches if expected.items() <= launch.items())
        time = predict.scan_time(launch, kernels[rule, kernel])
        assert 0.5 * limit < time["us"] <= limit, (rule, kernel, time)


def test_the_triton_kernels_issue_few_instructions(rows):
    pytest.importorskip("triton.backends.nvidia")
    version = metadata.version("triton")[:3]
    limits, stack = TRITON_36_LIMITS if version == "3.6" else TRITON_LIMITS, TRITON_STACK.get(version, 0)
    found = rows("triton")
    assert {(row["rule"], row["kernel"]) for row in found} >= MODELLED_LIMITS.keys()
    for row in found:
        if "cycles" not in row:  # not of the chunk kernels, which tests/ops/backends/test_triton_compiled.py limits
            check(row, limits.get(row["kernel"], 0), stack)


def test_the_model_of_a_warp_waits_for_loads_and_shares_a_scheduler():
    def control(stall=1, sets=7, waits=0):
        return (stall | sets << 5 | 7 << 8 | waits << 11) << 41

    load, use = ("@P0 LDG.E R2, desc[UR4][R4.64]", control(sets=0)), ("FFMA R1, R2, R3, R1", control(4, waits=1))
    trace = [stalls.decode(*instruction) for instruction in (load, use)]
    assert [(i.opcode, i.pipe, i.stall) for i in trace] == [("LDG", "memory", 1), ("FFMA", "fma", 4)]
    alone = stalls.cycles(trace, 1)
    # The load in its pipe, its latency, the stall of the FFMA.
    assert alone == pytest.approx(4 + stalls.LATENCY["LDG"] + 4, rel=0.01)
    assert stalls.cycles(trace, 2) == pytest.approx(alone, rel=0.02)  # the second warp runs while the first waits
    busy = [stalls.decode("FFMA R1, R2, R3, R1", control())] * 100
    assert stalls.cycles(busy, 3) == pytest.approx(3 * stalls.cycles(busy, 1), rel=0.02)  # one instruction a cycle
