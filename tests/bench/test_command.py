"""The command prints and writes the same figures, and refuses wrong options."""

import json
import statistics
import time

import pytest
import torch

from vilonghorn.bench import __main__ as command
from vilonghorn.bench import candidates, interleaved
from vilonghorn.bench.candidates import STEPS, Workload

FAMILIES = (("vim_nano", "vilonghorn_nano"), ("vilonghorn_nano_exact",))


def run_here(made, steps, rounds, *, threads, device, restarts):
    """Runs the candidates in this process."""
    found = {step: {} for step in steps}
    for name, make in made.items():
        try:
            candidate = interleaved._Candidate(make, device, time.perf_counter)
            for step in steps:
                candidate.warm_up(step)
                ms = [candidate.measure()[0] for _ in range(rounds)]
                found[step][name] = dict(ms=ms, memory_gb=0.5, problem=None)
        except RuntimeError as error:
            found = {s: rows | {name: dict(ms=None, memory_gb=None, problem=str(error))} for s, rows in found.items()}
    return found


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Scans and models that take no time."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(command, "run_interleaved", run_here)
    monkeypatch.setattr(interleaved, "SAMPLE_SECONDS", 0.001)
    monkeypatch.setitem(candidates.WORKLOADS, "cpu", [Workload(2, 17, 6, 4)])
    for module in (command, command.report):
        monkeypatch.setattr(module, "FAMILIES", FAMILIES)
    monkeypatch.setattr(command, "SIZES", (32, 48))
    monkeypatch.setattr(command.report, "TINY", "vilonghorn_nano")
    yield
    torch.set_num_threads(threads)


def run(*arguments: str) -> int:
    return command.main([*arguments, "--device", "cpu", "--threads", "1", "--batch", "1"])


def test_the_command_prints_and_writes_the_same_figures(tmp_path, capsys):
    assert run("--rounds", "2", "--json", f"{tmp_path}/bench.json") == 0
    report, printed = json.loads((tmp_path / "bench.json").read_text()), capsys.readouterr().out
    assert report["machine"]["threads"] == 1 and report["finished"]
    assert list(report["seconds"]) == ["scan", "models", "profile"]
    cells = [(row["model"], row["size"], row["train"]) for row in report["models"]]
    families = ((FAMILIES[0], 32), (FAMILIES[0], 48), (FAMILIES[1], 32))
    assert cells == [(name, size, train) for names, size in families for train in STEPS for name in names]
    expected = candidates.scan_candidates(candidates.WORKLOADS["cpu"][0], "cpu")
    assert [(r["rule"], r["backend"], r["train"]) for r in report["scan"]] == [(*c, t) for t in STEPS for c in expected]
    for row in report["scan"]:
        assert len(row["ms"]) == len(row["memory_bound_ms"]) == 6 and f"{statistics.median(row['ms']):.2f}" in printed
    for row in report["models"] + report["growth"]:
        assert len(row["ms"]) == 2
    assert all(f"| {statistics.median(row['ms']):.1f} |" in printed for row in report["models"])
    assert [(row["size"], row["train"]) for row in report["growth"]] == [(s, t) for t in STEPS for s in (32, 48)]
    assert f"| `{report['profile']['ops'][0]['op']}` |" in printed
    assert any(op["op"].startswith("vilonghorn::") for op in report["profile"]["ops"])
    assert "| at most |" in printed and report["targets"][0]["target"] in printed


def test_a_model_that_fails_is_named_and_the_others_are_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command, "FAMILIES", (("vim_nano", "no_such_model"), ()))
    assert run("models", "--size", "32", "--rounds", "1", "--json", f"{tmp_path}/bench.json") == 1
    report = json.loads((tmp_path / "bench.json").read_text())
    assert [bool(row["ms"]) for row in report["models"]] == [True, False] * 2 and not report["finished"]
    assert "not measured: no_such_model, 32, forward: Unknown model (no_such_model)" in capsys.readouterr().out


def test_an_interrupted_run_saves_what_it_measured(monkeypatch, tmp_path, capsys):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(command.Benchmark, "profile", stop)
    assert run("models", "profile", "--size", "32", "--rounds", "1", "--json", f"{tmp_path}/bench.json") == 130
    report = json.loads((tmp_path / "bench.json").read_text())
    assert len(report["models"]) == 6 and not report["finished"] and report["targets"]
    assert "holds what was measured" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["scam"], "expected scan, models, profile"),
        (["--rounds", "0"], "--rounds: invalid PositiveInt value: '0'"),
        (["--size", "224", "300"], "--size 300: expected a multiple of 16 pixels"),
        (["--json", "no/such/folder/bench.json"], "there is no folder"),
        pytest.param(
            ["--device", "cuda"],
            "torch finds no GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
    ids=str,
)
def test_wrong_options_are_refused(arguments, said, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(arguments)
    assert stop.value.code == 2 and said in capsys.readouterr().err
