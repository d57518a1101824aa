"""Runs side by side."""

from __future__ import annotations

import pytest
from toy_run import toy_trainer

from vilonghorn.tools.compare import differences, main, read_run, row


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    results = {}
    for name, options in (("a", ()), ("b", ("--optimizer.lr=4e-3", "--ema.decay=0"))):
        results[str(root / name)] = toy_trainer(root / name, "--schedule.epochs=2", *options).fit()
    return results


def test_the_table_holds_what_training_said(runs):
    for path, result in runs.items():
        line = row(read_run(path))
        assert line["top-1"] == f"{result['top1']:.2f}" and line["loss"] == f"{result['loss']:.4f}"
        assert line["best top-1"] == f"{result['best']['top1']:.2f} (epoch {result['best']['epoch']})"
        assert line["epochs"] == "2/2" and line["images an update"] == "8" and float(line["images/s"]) > 0


def test_only_what_differs_is_listed(runs):
    a, b = runs
    assert differences([read_run(path) for path in runs]) == [
        {"key": "optimizer.lr", a: "0.002", b: "0.004"},
        {"key": "ema.decay", a: "0.9", b: "0.0"},
    ]


def test_the_command_prints_tables_and_draws(runs, tmp_path, capsys):
    assert main([*runs, "--plot", str(tmp_path / "compare.png")]) == 0
    out = capsys.readouterr().out
    assert all(f"| {path} |" in out for path in runs) and "What differs" in out
    assert (tmp_path / "compare.png").read_bytes()[:4] == b"\x89PNG"


def test_a_run_in_progress_is_read_up_to_its_last_whole_line(tmp_path, capsys):
    trainer = toy_trainer(tmp_path, "--schedule.epochs=2")
    assert main([str(tmp_path)]) == 0
    assert "0/2" in capsys.readouterr().out
    trainer.fit()
    with open(tmp_path / "log.jsonl", "ab") as log:
        log.write(b'{"kind": "tr')
    assert row(read_run(tmp_path))["epochs"] == "2/2"


def test_a_damaged_line_of_a_log_is_named_and_left_out(tmp_path):
    toy_trainer(tmp_path, "--schedule.epochs=3").fit()
    whole, lines = row(read_run(tmp_path)), (tmp_path / "log.jsonl").read_bytes().split(b"\n")
    number = next(i for i, line in enumerate(lines) if b'"epoch": 2' in line and b'"kind": "epoch"' in line)
    lines[number] = lines[number].replace(b'"model"', b'"modem"')
    (tmp_path / "log.jsonl").write_bytes(b"\n".join(lines))
    with pytest.warns(UserWarning, match=f"line {number + 1} of .*log.jsonl is damaged"):
        found = row(read_run(tmp_path))
    assert {**found, "best top-1": ""} == {**whole, "best top-1": ""} and found["epochs"] == "3/3"


def test_what_is_no_run_is_named(runs, tmp_path, capsys):
    assert main([*runs, str(tmp_path)]) == 2
    assert f"{tmp_path} holds no run: there is no config.yaml" in capsys.readouterr().err
    for name in ("config.yaml", "environment.json", "log.jsonl"):
        (tmp_path / name).write_text("[1]\n")
    assert main([str(tmp_path)]) == 2
    assert f"{tmp_path} is not the directory of a run" in capsys.readouterr().err
