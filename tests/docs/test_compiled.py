"""The GPU kernels compile without a GPU, keep their states in registers, and issue few instructions per step."""

import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docs" / "performance" / "compiled.py"


sys.path.append(str(SCRIPT.parent))
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


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_the_modelled_time_of_the_cuda_kernels_does_not_rise(compile_kernels):
    sizes = dict(batch=128, tokens=197, channels=384)
    launches = json.loads((SCRIPT.parent / "block.json").read_text())["scans"]
    kernels = {(row["rule"], row["kernel"]): row for row in compile_kernels("cuda", 90) if "cycles" in row}
    for (rule, kernel), limit in MODELLED_LIMITS.items():
        expected = sizes | {"rule": rule, "pass": kernel}
        [launch] = (launch for launch in launches if expected.items() <= launch.items())
        time = predict.scan_time(launch, kernels[rule, kernel])
        print(rule, kernel, time)
        assert 0.5 * limit < time["us"] <= limit, "lower the limit" if time["us"] < limit else "the kernel got slower"


def check(row, limit, stack=0):
    print(row)
    assert row["stack"] <= stack and row["local"] == 0, row
    assert row.get("instructions", 0) <= limit, row


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize("architecture", compiled.ARCHITECTURES)
def test_the_cuda_kernels_spill_nothing_in_a_step_and_issue_few_instructions(architecture, compile_kernels):
    rows = compile_kernels("cuda", architecture)
    # Three rules: forward and backward for three dtypes and for 64 states, summaries for three dtypes, and joins. Sums
    # for three dtypes.
    assert len(rows) == 3 * (2 * 4 + 3 + 1) + 3
    assert sum("instructions" in row for row in rows) == 3 * 2 * 3
    for row in rows:
        # With six blocks a multiprocessor, a few values of the loops around the steps do not fit in registers.
        crowded = architecture >= 90 and row["kernel"] == "backward" and row["states"] == 16 and row["rule"] != "mamba"
        check(row, CUDA_LIMITS.get(row["kernel"], {}).get(row["rule"], 0), 24 if crowded else 0)


@pytest.mark.parametrize("architecture", compiled.ARCHITECTURES)
def test_the_triton_kernels_issue_few_instructions(architecture, compile_kernels):
    pytest.importorskip("triton.backends.nvidia")
    version = metadata.version("triton")[:3]
    limits, stack = TRITON_36_LIMITS if version == "3.6" else TRITON_LIMITS, TRITON_STACK.get(version, 0)
    rows = compile_kernels("triton", architecture)
    assert len(rows) == 3 * 6  # three rules: forward and backward, with and without a split, summary and join
    for row in rows:
        check(row, limits.get(row["kernel"], 0), stack)


def test_loops_are_read_from_branches_that_go_back():
    lines = ["MOV", "FFMA", "@P0 BRA 0x40", "FMUL", "@P1 BRA 0x10", "BRA.DIV ~URZ, 0x0", "@P2 BRA 0x10", "BRA 0x70"]
    kernel = compiled.Kernel({}, [(16 * i, line) for i, line in enumerate(lines)])
    assert kernel.loops() == [range(1, 7)]


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


def test_the_blocks_that_do_not_fit_run_in_another_wave():
    launch = dict(blocks=132 * 4, threads=64, shared=2048, tokens=198)
    kernel = dict(registers=237, cycles=[1000.0, 1500.0])
    assert predict.scan_time(launch, kernel) == dict(waves=1.0, us=pytest.approx(198 * 1500 / 1980))
    more = predict.scan_time(launch | dict(blocks=132 * 5), kernel)
    assert more == dict(waves=1.25, us=pytest.approx(198 * 2500 / 1980))
    assert predict.occupancy(launch | dict(shared=100_000), 237) == 2
