"""The command: what it prints is what it writes, and what it refuses."""

import json
import math
import statistics
from types import SimpleNamespace

import pytest
import torch

from vilonghorn.bench import __main__ as bench
from vilonghorn.bench import check as bench_check
from vilonghorn.bench import cpu as bench_cpu
from vilonghorn.bench.floor import Shape
from vilonghorn.bench.report import tokens
from vilonghorn.ops import backends as dispatch
from vilonghorn.ops import reference
from vilonghorn.ops.backends import cpu as native
from vilonghorn.ops.products import has_tiles

FAMILIES = (("vim_nano", "vilonghorn_nano"), ("vilonghorn_nano_exact",))
BACKEND = native if native.unavailable("cpu") is None else reference


@pytest.fixture
def one_small_case(monkeypatch):
    """One backend, rule, type and shape to check."""
    monkeypatch.setattr(bench_check, "SHAPES", {"cpu": (bench_check.Shape(2, 5, 6, 4, (False, True), sliced=True),)})
    monkeypatch.setattr(bench_check, "RULES", ("mamba",))
    monkeypatch.setattr(bench_check, "TOLERANCE", {torch.float32: 5e-6})
    for name in list(dispatch.BACKENDS):
        if name != BACKEND.NAME:
            monkeypatch.delitem(dispatch.BACKENDS, name)


def run(*arguments: str) -> int:
    threads = torch.get_num_threads()
    try:
        return bench.main([*arguments, "--device", "cpu", "--threads", "1"])
    finally:
        torch.set_num_threads(threads)


@pytest.fixture
def small_subjects(monkeypatch):
    """Scans and models that take no time."""
    monkeypatch.setattr(bench_cpu, "SCAN", Shape(2, 17, 6, 4))
    monkeypatch.setattr(bench_cpu, "RULES", ("longhorn",))
    monkeypatch.setattr(bench_cpu, "FAMILIES", FAMILIES)
    monkeypatch.setattr(bench_cpu, "SIZES", (32, 48))
    monkeypatch.setattr(bench_cpu, "TOKENS", 8)
    monkeypatch.setattr(bench_cpu, "GROWING", "vilonghorn_nano")
    monkeypatch.setattr(bench, "PROFILED", ("vilonghorn_nano", 32))


def test_the_command_prints_tables_and_writes_the_same_figures(small_subjects, tmp_path, capsys):
    files = ["--json", str(tmp_path / "bench.json"), "--plot", str(tmp_path / "bench.svg")]
    assert run("--batch", "1", "--rounds", "2", *files) == 0
    report = json.loads((tmp_path / "bench.json").read_text())
    printed = capsys.readouterr().out
    assert report["machine"]["threads"] == 1 and report["finished"] and report["shape"]["B"] == 1
    assert list(report["seconds"]) == ["scan", "model", "profile"]
    copies = [statistics.median(rates["gb_per_s"]) for rates in report["rates"].values()]
    assert all(f"{rate:.1f} GB/s" in printed for rate in copies) and len(copies) == 2
    cells = [(row["model"], row["size"], row["train"]) for row in report["models"]]
    assert cells == [(n, s, t) for names in FAMILIES for s in (32, 48) for t in (False, True) for n in names]
    contenders = bench_cpu.scan_contenders(bench_cpu.SCAN)
    found = [(row["rule"], row["form"], row["train"]) for row in report["scan"]]
    assert found == [(*contender, train) for train in (False, True) for contender in contenders]
    for row in report["scan"] + report["models"] + report["growth"]:
        assert row["problem"] is None
    for row in report["scan"] + report["models"]:
        assert len(row["ms"]) == (6 if "rule" in row else 2) and f"{statistics.median(row['ms']):.2f}" in printed
    assert [(row["size"], row["train"]) for row in report["growth"]] == [
        (s, t) for t in (False, True) for s in (32, 48)
    ]
    [large, small] = [statistics.median(row["ms"]) / tokens(row) for row in report["growth"][1::-1]]
    assert f"{small:.4f}" in printed and f"{large:.4f}" in printed
    ops = [op["op"] for op in report["profile"]["ops"]]
    operator = "vilonghorn::mix" if native.unavailable("cpu") is None else "vilonghorn::scan"
    operator = "vilonghorn::block/mix" if has_tiles() else operator
    assert operator in ops and report["profile"]["ops"][0]["op"] in printed
    assert report["targets"][0]["verdict"] in ("met", "NOT MET") and "at most" in printed
    assert "</svg>" in (tmp_path / "bench.svg").read_text()


def test_what_fails_is_named_and_the_rest_goes_on(small_subjects, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench_cpu, "FAMILIES", (("vim_nano", "no_such_model"),))
    assert run("model", "--size", "32", "--rounds", "1", "--json", str(tmp_path / "bench.json")) == 1
    rows = json.loads((tmp_path / "bench.json").read_text())["models"]
    assert [bool(row["ms"]) for row in rows] == [True, False] * 2 and "no_such_model" in rows[1]["problem"]
    assert "not measured: no_such_model, 32: RuntimeError" in capsys.readouterr().out


def test_what_was_measured_survives_an_interruption(small_subjects, monkeypatch, tmp_path, capsys):
    def rows_until_stopped(*_):
        figures = dict(ms=[1.0], memory_gb=None, problem=None, arithmetic_ms=[0.5], bytes_ms=[0.5])
        yield [dict(rule="mamba", form="cpu", train=False, **figures)], dict(slots_per_s=dict(v3=[1e9]), gb_per_s=[1.0])
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_cpu, "scan_rows", rows_until_stopped)
    assert run("--json", str(tmp_path / "bench.json")) == 130
    report = json.loads((tmp_path / "bench.json").read_text())
    assert len(report["scan"]) == 1 and not report["finished"] and report["targets"]
    assert "has what was measured" in capsys.readouterr().out


def test_what_time_does_not_suffice_for_is_left_out_and_named(small_subjects, tmp_path, capsys):
    assert run("scan", "model", "--minutes", "0", "--json", str(tmp_path / "bench.json")) == 0
    report = json.loads((tmp_path / "bench.json").read_text())
    assert (
        report["scan"] == report["models"] == [] and len(report["not_measured"]) == 1 + 2 * 2 + 1
    )  # scans, models, growth
    assert {row["verdict"] for row in report["targets"]} == {"not measured"}


def test_right_backends_pass_the_check(one_small_case, tmp_path, capsys):
    assert run("check", "--json", str(tmp_path / "bench.json"), "--seed", "3") == 0
    report = json.loads((tmp_path / "bench.json").read_text())
    assert [row["problem"] for row in report["checks"]] == [None] * 6  # values in four forms, repetition, threads
    assert report["seed"] == 3 and "seed of the checks: 3" in capsys.readouterr().out


def backward_wrong_in_dA(dy, args, checkpoints):
    *before, dA, dD, dt_bias = BACKEND.backward(dy, args, checkpoints)
    return (*before, dA * 1.001, dD, dt_bias)


def forward_that_leaves_an_element_out(args, save):
    y, checkpoints = BACKEND.forward(args, save)
    left = torch.empty_like(y)
    left.view(-1)[1:] = y.view(-1)[1:]
    return left, checkpoints


def forward_that_differs_from_call_to_call(args, save, calls=[]):  # noqa: B006
    calls.append(None)
    y, checkpoints = BACKEND.forward(args, save)
    return y * (1 + 1e-6 * (len(calls) % 2)), checkpoints


def forward_that_raises(args, save):
    raise RuntimeError("no such kernel image")


@pytest.mark.parametrize(
    "part, said",
    [
        (dict(backward=backward_wrong_in_dA), "A is off by 1.0e-03"),
        (dict(forward=forward_that_leaves_an_element_out), "y is off by inf"),
        (dict(forward=forward_that_differs_from_call_to_call), "not bitwise equal: y"),
        (dict(forward=forward_that_raises), "no such kernel image"),
    ],
    ids=["gradient", "unwritten", "varying", "raising"],
)
def test_a_wrong_backend_is_named_and_the_exit_status_is_not_zero(
    part, said, one_small_case, monkeypatch, tmp_path, capsys
):
    parts = ("NAME", "CHUNK", "LANES", "unavailable", "forward", "backward")
    wrong = SimpleNamespace(**{name: getattr(BACKEND, name) for name in parts} | part)
    monkeypatch.setitem(dispatch.BACKENDS, BACKEND.NAME, wrong)
    assert run("check", "--json", str(tmp_path / "bench.json")) == 1
    printed = capsys.readouterr().out
    assert f"FAIL {BACKEND.NAME} mamba float32" in printed and said in printed
    assert any(row["problem"] for row in json.loads((tmp_path / "bench.json").read_text())["checks"])


def test_nothing_to_check_is_not_a_pass(one_small_case, monkeypatch):
    monkeypatch.delitem(dispatch.BACKENDS, BACKEND.NAME)
    assert run("check") == 1


def test_what_time_does_not_suffice_for_is_named_and_unchecked_is_not_passed(one_small_case, capsys):
    assert run("check", "--minutes", "0") == 1
    assert "not begun in the time there was" in capsys.readouterr().out


def test_poison_is_in_new_memory_and_gone_afterwards():
    before = torch.are_deterministic_algorithms_enabled()
    with bench_check.poisoned("cpu"):
        assert torch.empty(4).isnan().all()
    assert torch.are_deterministic_algorithms_enabled() == before


def test_relative_errors_see_nan():
    one = torch.ones(3, dtype=torch.float64)
    assert bench_check.relative_error(torch.tensor([1.0, 1.0, math.nan]), one) == math.inf
    assert bench_check.relative_error(torch.tensor([1.0, 1.0, 2.0]), one) == pytest.approx(3**-0.5)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["scam"], "expected check, scan, block, model, profile"),
        (["--rounds", "0"], "at least 1"),
        (["--plot", "models.txt"], "ends in .png or .svg"),
        (["--json", "no/such/folder/bench.json"], "there is no folder"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(arguments, said, capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main(arguments)
    assert stop.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main(["--device", "cuda"])
    assert stop.value.code == 2 and "torch finds no GPU" in capsys.readouterr().err
