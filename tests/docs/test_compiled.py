"""The GPU kernels compile for sm_90 without a GPU, keep states in registers, and issue few instructions."""

import json
import os
import shutil
import subprocess
import sys
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
    ("longhorn", "backward"): 380,
    ("longhorn_exact", "forward"): 86,
    ("longhorn_exact", "backward"): 375,
}


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_the_cuda_kernels_spill_nothing_in_a_step_and_their_modelled_time_does_not_rise():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-W", "ignore", str(FOLDER / "compiled.py"), "90", "--backend", "cuda"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {(row["rule"], row["kernel"]) for row in found} >= MODELLED_LIMITS.keys()
    for row in found:
        # With six blocks a multiprocessor, a few values of the loops around the steps do not fit in registers.
        crowded = row["kernel"] == "backward" and row["states"] == 16 and row["rule"] != "mamba"
        assert row["stack"] <= (24 if crowded else 0) and row["local"] == 0, row
        assert row.get("instructions", 0) <= CUDA_LIMITS.get(row["kernel"], {}).get(row["rule"], 0), row
    sizes = dict(batch=128, tokens=197, channels=384)
    launches = json.loads((FOLDER / "block.json").read_text())["scans"]
    kernels = {(row["rule"], row["kernel"]): row for row in found if "cycles" in row}
    for (rule, kernel), limit in MODELLED_LIMITS.items():
        expected = sizes | {"rule": rule, "pass": kernel}
        [launch] = (launch for launch in launches if expected.items() <= launch.items())
        time = predict.scan_time(launch, kernels[rule, kernel])
        assert 0.5 * limit < time["us"] <= limit, (rule, kernel, time)


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
