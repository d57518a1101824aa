"""The script prints and writes the same figures, and refuses wrong options."""

import json
import statistics

import candidates
import pytest
import torch
from interleaved import STEPS

FAMILIES = (("vim_nano", "vilonghorn_nano"), ("vilonghorn_nano_exact",))


def run_here(made, steps, rounds, *, threads, device, restarts):
    """Runs each candidate once in this process, and makes up its times."""
    found = {step: {} for step in steps}
    for i, (name, make) in enumerate(made.items()):
        try:
            ready = make()
            for step in steps:
                ready[step]()
                found[step][name] = dict(ms=[i + 1.25] * rounds, memory_gb=0.5, problem=None)
        except RuntimeError as error:
            found = {s: rows | {name: dict(ms=None, memory_gb=None, problem=str(error))} for s, rows in found.items()}
    return found


@pytest.fixture
def models(script, monkeypatch):
    """The script, with models that take no time."""
    models = script("benchmarks/models")
    monkeypatch.setattr(candidates, "run_interleaved", run_here)
    monkeypatch.setattr(models, "FAMILIES", FAMILIES)
    monkeypatch.setitem(models.FULL, "size", [32, 64])
    return models


@pytest.fixture
def run(models):
    return lambda *arguments: models.main([*arguments, "--device", "cpu", "--threads", "1", "--batch", "1"])


def test_the_script_prints_and_writes_the_same_figures(run, tmp_path, capsys):
    assert run("--rounds", "2", "--json", f"{tmp_path}/models.json") == 0
    report, printed = json.loads((tmp_path / "models.json").read_text()), capsys.readouterr().out
    assert report["machine"]["threads"] == 1 and report["command"][:2] == ["python", "benchmarks/models.py"]
    cells = [(row["model"], row["size"], row["train"]) for row in report["models"]]
    families = ((FAMILIES[0], 32), (FAMILIES[0], 64), (FAMILIES[1], 32))
    assert cells == [(name, size, train) for names, size in families for train in STEPS for name in names]
    for row in report["models"]:
        assert len(row["ms"]) == 2 and f"| {statistics.median(row['ms']):.2f}"[:-1] in printed


def test_a_model_that_fails_is_named_and_the_others_are_measured(models, run, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(models, "FAMILIES", (("vim_nano", "no_such_model"), ()))
    assert run("--size", "32", "--rounds", "1", "--json", f"{tmp_path}/models.json") == 1
    report = json.loads((tmp_path / "models.json").read_text())
    assert [bool(row["ms"]) for row in report["models"]] == [True, False] * 2
    assert "not measured: no_such_model: Unknown model (no_such_model)" in capsys.readouterr().out


def test_an_interrupted_run_has_saved_what_it_measured(models, run, monkeypatch, tmp_path):
    def stop(rows):
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "model_lines", stop)
    with pytest.raises(KeyboardInterrupt):
        run("--size", "32", "--rounds", "1", "--json", f"{tmp_path}/models.json")
    assert len(json.loads((tmp_path / "models.json").read_text())["models"]) == 4


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["scam"], "unrecognized arguments: scam"),
        (["--rounds", "0"], "--rounds: invalid PositiveInt value: '0'"),
        (["--size", "224", "240"], "--size 240: expected a multiple of 32 pixels"),
        (["--json", "no/such/folder/models.json"], "there is no folder"),
        (["--device", "cuda"], "torch finds no GPU"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(arguments, said, models, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        models.main(arguments)
    assert stop.value.code == 2 and said in capsys.readouterr().err


def test_losses_are_bold_and_a_row_without_figures_has_no_line(script):
    times = dict(deit_small_patch16_224=300.0, vilonghorn_small=330.0, vilonghornv2_small=None)
    rows = [
        dict(model=name, size=224, batch=8, train=train, ms=ms and [ms] * 3, memory_gb=(ms or 0) / 300)
        for name, ms in times.items()
        for train in (False, True)
    ]
    first, second = (list(line.values()) for line in script("benchmarks/models").model_lines(rows))
    assert first == ["224", "8", "`deit_small_patch16_224`", "300", "1.00", "300", "1.00", "1.00", "1.00"]
    assert second == ["224", "8", "`vilonghorn_small`", "330", "**1.10**", "330", "**1.10**", "1.10", "**1.10**"]
