"""The timings for GPUs, as far as a CPU can take them: what is timed, what is reckoned, what is printed.

Only events, graphs, the size of the cache and the peak of memory need a device; a fake stands for the events.
"""

import json
import statistics
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from vilonghorn.bench import (
    __main__ as bench,
)
from vilonghorn.bench import (
    device as bench_device,
)
from vilonghorn.bench import (
    model as bench_model,
)
from vilonghorn.bench import (
    report as bench_report,
)
from vilonghorn.bench import (
    scan as bench_scan,
)
from vilonghorn.bench.tasks import Outcome
from vilonghorn.ops import backends as dispatch
from vilonghorn.ops import reference, scan
from vilonghorn.ops.backends import cpu as native

BACKEND = "cpu" if native.unavailable("cpu") is None else "reference"
WORKLOADS = (
    bench_scan.Workload("two directions averaged, gated", 2, 5, 6, 4, (False, True), True),
    bench_scan.Workload("one direction, no gate", 1, 7, 6, 4, (False,), False),
)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(bench_device, "MOST", 3)
    monkeypatch.setattr(bench_device, "LEAST", 1)
    monkeypatch.setattr(bench_scan, "WORKLOADS", WORKLOADS)


def test_events_surround_each_call(monkeypatch):
    clock = SimpleNamespace(now=0.0)

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = clock.now
            clock.now += 0.25  # between one event and the next

        def elapsed_time(self, end):
            return end.at - self.at

    def call():
        clock.now += 7

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert bench_device.call_times(call, "cuda") == [7.25, 7.25, 7.25]


def test_a_sample_of_several_calls_is_divided_among_them():
    ran = []
    times = bench_device.device_times([lambda: ran.append(0), lambda: ran.append(1)], "cpu")
    assert ran[:4] == [0, 1, 0, 1] and len(times) == 3
    assert statistics.median(times) >= 0


def test_a_copy_counts_what_it_reads_and_what_it_writes():
    task = bench_device.CopyTask("cpu", elements=1000)
    task.prepare()
    [row] = task.measure()
    assert row["bytes"] == 2 * 1000 * 2
    assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["median_ms"] / 1e6)
    assert torch.equal(task.source, task.target)


def test_inputs_rotate_through_more_than_the_cache(monkeypatch):
    monkeypatch.setattr(bench_scan, "cache_bytes", lambda device: 10_000)
    calls, moved = bench_scan.ScanTask("cpu", BACKEND, "longhorn")._calls(WORKLOADS[0], train=False)
    assert len(calls) * moved >= 30_000 > (len(calls) - 1) * moved
    inputs = [call.args[1]["x"] for call in calls]
    assert len({x.data_ptr() for x in inputs}) == len(calls) and not torch.equal(*inputs[:2])


def test_the_floor_counts_each_tensor_as_often_as_it_must_move():
    G, B, L, D, N = 2, 2, 5, 6, 4
    values, y = bench_scan.draw(WORKLOADS[0], "mamba", torch.Generator())
    activations, parameters = 2 * (2 * G * B * L * D + 2 * G * B * L * N + B * L * D), 4 * (2 * G * D + G * D * N)
    inputs, output = activations + parameters, 2 * B * L * D
    assert bench_scan.bytes_moved(values, y, train=False) == inputs + output
    assert bench_scan.bytes_moved(values, y, train=True) == (inputs + output) + (inputs + output) + inputs


def test_every_workload_of_every_rule_is_in_a_table_with_its_floor(capsys):
    outcomes = []
    for rule in bench_scan.RULES:
        task = bench_scan.ScanTask("cpu", BACKEND, rule)
        task.prepare()
        outcomes.append(Outcome(task, task.measure()))
    tables = bench_scan.report_scans(outcomes, gb_per_s=10.0)
    printed = capsys.readouterr().out
    assert len(tables) == 4
    for table in tables:
        assert table["title"] in printed
        assert set(table["rows"]) == {f"{BACKEND} {rule}" for rule in bench_scan.RULES}
        for row in table["rows"].values():
            assert row["x floor"] == pytest.approx(row["median_ms"] / row["floor ms"])


def selective_scan(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False):
    """mamba_ssm's interface over our scan: its tensors are (B, D, L) and (B, N, L), its z gates each call."""
    assert delta_softplus and all(t.is_contiguous() for t in (u, delta, B, C))
    x, dt, k, q = (t.mT[None] for t in (u, delta, B, C))
    y = scan(
        x,
        dt,
        k,
        q,
        z=None if z is None else z.mT,
        A=A[None],
        D=D[None],
        dt_bias=delta_bias[None],
        rule="mamba",
        backend=BACKEND,
    )
    return y[0].mT


@pytest.mark.parametrize("workload", WORKLOADS[1:], ids=lambda w: w.title)
def test_mamba_ssm_is_given_the_same_work(workload, monkeypatch):
    interface = ModuleType("mamba_ssm.ops.selective_scan_interface")
    interface.selective_scan_fn = selective_scan
    monkeypatch.setitem(sys.modules, "mamba_ssm", ModuleType("mamba_ssm"))
    monkeypatch.setitem(sys.modules, "mamba_ssm.ops", ModuleType("mamba_ssm.ops"))
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    values, cotangent = bench_scan.draw(workload, "mamba", torch.Generator())
    theirs, leaves, cotangents = bench_scan.peer_call(values, cotangent, "mamba", workload.reverse)
    [result] = theirs(**leaves)
    ours, own_leaves, _ = bench_scan.own_call(values, cotangent, "mamba", workload.reverse, BACKEND)
    [expected] = ours(**own_leaves)
    torch.testing.assert_close(result.mT, expected)
    grads = torch.autograd.grad([result], list(leaves.values()), cotangents)
    expected_grads = torch.autograd.grad([expected], list(own_leaves.values()), [cotangent])
    assert len(grads) == len(expected_grads)
    torch.testing.assert_close(grads[0].mT, expected_grads[0][0])
    task = bench_scan.ScanTask("cpu", "mamba_ssm", "mamba")
    assert not task.required
    task.prepare()
    rows = task.measure()
    found = [(row["workload"]["title"], row["train"]) for row in rows]
    assert found == [(w.title, train) for w in WORKLOADS for train in (False, True)]


def test_models_are_timed_in_every_cell(monkeypatch, capsys):
    names = ("vilonghorn_nano", "vim_nano")
    monkeypatch.setattr(bench_model, "NAMES", names)
    tasks = [bench_model.ModelTask("cpu", name, [(32, True), (32, False)], False, 2) for name in names]
    outcomes = []
    for task in tasks:
        task.prepare()
        outcomes.append(Outcome(task, task.measure()))
    tables, rows = bench_model.report_models(outcomes)
    assert [list(table["rows"]) for table in tables] == [list(names)] * 2
    printed = capsys.readouterr().out
    for row in rows:
        assert row["images_per_s"] == pytest.approx(2 / statistics.median(row["ms"]) * 1e3)
        assert f"{row['images_per_s']:.4g}" in printed


def test_a_model_without_memory_is_named(monkeypatch, capsys):
    task = bench_model.ModelTask("cpu", "vim_tiny", [(32, True)], False)

    def fail(size, train):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(task, "_step", fail)
    tables, rows = bench_model.report_models([Outcome(task, task.measure())])
    assert tables == [] and rows[0]["problem"] == "out of memory"
    assert "vim_tiny" in capsys.readouterr().out


def test_larger_images_come_in_smaller_batches():
    batches = [bench_model.ModelTask("cuda", "vim_tiny", [], False)._batch(size) for size in (224, 384, 512, 1024)]
    assert batches == [128, 43, 24, 6]


def test_what_matters_most_is_compiled_first():
    first, eager, rest = bench_model.model_tasks("cuda", (224, 768), None)
    assert {task.cells[0] for task in first} == {(224, True)} and all(task.compiled for task in first + rest)
    cells = [(size, train) for size in (224, 768) for train in (False, True)]
    assert [(task.name, task.cells) for task in eager] == [(name, cells) for name in bench_model.NAMES]
    assert [task.cells[0] for task in rest[:: len(bench_model.NAMES)]] == [(224, False), (768, True), (768, False)]


def test_a_block_is_profiled(capsys):
    task = bench_model.BlockTask("cpu", "longhorn", compiled=False, batch=1, dim=16, tokens=5, repeats=2)
    task.prepare()
    [found] = bench_model.report_blocks([Outcome(task, task.measure())])
    calls = {row["kernel"]: row["calls"] for row in found["kernels"]}
    operator = "vilonghorn::mix" if native.unavailable("cpu") is None else "vilonghorn::scan"
    assert calls[operator] == calls[f"{operator}_backward"] == 1
    assert operator in capsys.readouterr().out


def test_on_a_gpu_only_its_own_kernels_count():
    def event(key, kind, us):
        return SimpleNamespace(key=key, count=4, device_type=kind, self_device_time_total=us, self_cpu_time_total=9)

    times = [("op", DeviceType.CPU, 8.0), ("small", DeviceType.CUDA, 2.0), ("large", DeviceType.CUDA, 6.0)]
    events = [event(*time) for time in times]
    assert bench_model.kernels(events, "cuda", repeats=2) == [
        dict(kernel="large", calls=2, us=3.0),
        dict(kernel="small", calls=2, us=1.0),
    ]


def test_the_command_for_gpus_reports_every_subject(monkeypatch, tmp_path, capsys):
    """Tasks of a CPU in the places of those of a GPU: the way from the command to its files is the same."""
    names = ("vilonghorn_nano", "vim_nano")
    scans = [bench_scan.ScanTask("cpu", BACKEND, "mamba"), bench_scan.ScanTask("cpu", "no such backend", "mamba")]
    models = [[bench_model.ModelTask("cpu", name, [(32, True), (48, True)], False, 1)] for name in names]
    block = bench_model.BlockTask("cpu", "longhorn", compiled=False, batch=1, dim=16, tokens=5)
    found = bench_report.machine("cpu") | dict(mamba_ssm="not installed", gpu="a GPU in words")
    monkeypatch.setattr(bench_model, "NAMES", names)
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench, "machine", lambda device: found)
    monkeypatch.setattr(bench, "CopyTask", lambda device: bench_device.CopyTask("cpu", elements=100))
    monkeypatch.setattr(bench_scan, "scan_tasks", lambda device: scans)
    monkeypatch.setattr(bench_model, "BlockTask", lambda device, rule, compiled: block)
    monkeypatch.setattr(bench_model, "model_tasks", lambda device, sizes, batch: models)
    monkeypatch.setattr(bench_model, "at_once", lambda device: 2)
    files = ["--json", str(tmp_path / "bench.json"), "--plot", str(tmp_path / "bench.png")]
    assert bench.main(["scan", "block", "model", "--jobs", "1", *files]) == 1  # for the backend that there is not
    printed = capsys.readouterr().out
    report = json.loads((tmp_path / "bench.json").read_text())
    assert [table["title"] in printed for table in report["tables"]] == [True] * (2 * len(WORKLOADS) + 2)
    assert [row["task"] for row in report["not_measured"]] == ["no such backend mamba"]
    assert "not measured: no such backend mamba" in printed and "mamba_ssm is not installed" in printed
    assert f"{report['copy']['gb_per_s']:.0f} GB/s" in printed
    assert len(report["models"]) == 4 and len(report["profiles"]) == 2
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_no_backend_of_another_device_is_timed():
    assert {task.backend for task in bench_scan.scan_tasks("cpu")} <= {"cpu"} <= set(dispatch.BACKENDS)
    assert reference.NAME not in {task.backend for task in bench_scan.scan_tasks("cuda")}
