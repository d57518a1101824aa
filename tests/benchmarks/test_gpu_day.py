"""The scripts of a day on a GPU say how they are called and that there is no GPU, and peers get the same work."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from interleaved import STEPS
from oracle import error, oracle
from torch.autograd import DeviceType

from vilonghorn.ops import scan

ROOT = Path(__file__).parents[2]
SIZES = (2, 17, 8, 4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which a stage would occupy for minutes")
def test_a_stage_without_a_gpu_says_so(tmp_path):
    environment = os.environ | dict(PYTHON=sys.executable, OUT=str(tmp_path))
    command = ["bash", "benchmarks/gpu_day.sh", "time"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 3 and "torch finds none" in result.stdout and "FAILED" not in result.stdout, result


@pytest.mark.parametrize("limit, problem", [("0", "no time is left"), ("60", "exit status 1")])
def test_a_stage_ends_where_an_import_fails(limit, problem, tmp_path):
    environment = os.environ | dict(PYTHON="/bin/false", LIMIT=limit, OUT=str(tmp_path))
    command = ["bash", "benchmarks/gpu_day.sh", "check"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 1 and f"FAILED: imports: {problem}" in result.stdout, result
    assert "run gpu_day.sh pack" in result.stdout and "backends" not in result.stdout, result


def test_a_profile_counts_the_launches_of_a_step(gpu_day, monkeypatch):
    spans = [SimpleNamespace(start=2 * i, end=2 * i + 1) for i in range(2 * gpu_day.PROFILED_STEPS)]
    profiler = MagicMock()
    profiler.__enter__.return_value = profiler
    profiler.events.return_value = [SimpleNamespace(device_type=DeviceType.CUDA, time_range=span) for span in spans]
    profiler.key_averages.return_value = [SimpleNamespace(key="scan", self_device_time_total=6000.0)]
    monkeypatch.setattr(gpu_day, "profile", lambda activities: profiler)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    found = gpu_day.profiled("vilonghornv2_nano", 64, 2, "cpu")
    assert set(found) == set(STEPS.values())
    for row in found.values():
        assert row["launches"] == 2 and row["kernels"] == {"scan": 2.0} and row["busy_ms"] == 0.002


@pytest.fixture
def gpu_day(script):
    return script("benchmarks/gpu_day")


def selective_scan(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False):
    """The interface of mamba_ssm over our scan: its tensors are (B, D, L) and (B, N, L)."""
    assert delta_softplus and all(t.is_contiguous() for t in (u, delta, B, C))
    x, dt, k, q = (t.mT[None] for t in (u, delta, B, C))
    return scan(x, dt, k, q, z=z.mT, A=A[None], D=D[None], dt_bias=delta_bias[None], rule="mamba")[0].mT


def test_mamba_ssm_gets_the_same_work(gpu_day, monkeypatch):
    interface = ModuleType("mamba_ssm.ops.selective_scan_interface")
    interface.selective_scan_fn = selective_scan
    for module in (ModuleType("mamba_ssm"), ModuleType("mamba_ssm.ops"), interface):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    peer = gpu_day.mamba_ssm_steps(gpu_day.Workload(*SIZES), "cpu")
    ours = gpu_day.scan_steps("mamba", "reference", gpu_day.Workload(*SIZES), "cpu")
    torch.testing.assert_close(peer[STEPS[False]]().mT, ours[STEPS[False]]()[0])
    for actual, wanted in zip(peer[STEPS[True]](), ours[STEPS[True]](), strict=True):
        actual = actual.mT if actual.ndim == 3 else actual
        torch.testing.assert_close(actual.view_as(wanted), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "intervals, busy", [([], 0), ([(5, 6), (0, 2), (1, 3)], 4), ([(0, 9), (1, 2), (8, 10)], 10)], ids=str
)
def test_kernels_of_two_streams_count_once(intervals, busy, gpu_day):
    assert gpu_day.busy_us(intervals) == busy


@pytest.mark.parametrize("mode", ["eager", "compiled", "captured"])
def test_a_captured_model_is_compiled_first(mode, gpu_day, monkeypatch):
    given = {}
    monkeypatch.setattr(gpu_day, "model_steps", lambda **cell: given.update(cell) or {"forward": "step"})
    monkeypatch.setattr(gpu_day, "cuda_graph", lambda step: f"graph of {step}")
    steps = gpu_day.mode_steps(mode, model="vilonghornv2_nano")
    assert given == dict(model="vilonghornv2_nano", compiled=mode != "eager")
    assert steps == {"forward": "graph of step" if mode == "captured" else "step"}


def test_a_file_of_figures_is_not_replaced(gpu_day, tmp_path, capsys):
    path = tmp_path / "gpu-peers.json"
    path.write_text("{}")
    with pytest.raises(SystemExit):
        gpu_day.main(["peers", "--json", str(path)])
    assert "gpu-peers.json: the file exists" in capsys.readouterr().err and path.read_text() == "{}"


def test_chunks_are_the_exact_rule_with_one_dt_for_a_head(gpu_day):
    inputs, _ = gpu_day.scan_inputs("longhorn_exact", gpu_day.Workload(*SIZES), "cpu")
    inputs |= {name: inputs[name][..., : gpu_day.HEADS].repeat_interleave(2, -1) for name in ("dt", "dt_bias")}
    steps = gpu_day.chunk_steps(gpu_day.Workload(*SIZES), "cpu")
    assert error(steps[STEPS[False]](), oracle(**inputs, rule="longhorn_exact")) < 1e-6
    assert len(steps[STEPS[True]]()) == len(inputs)
