"""Runs side by side."""

import shutil

import pytest
from toy_run import toy_trainer

from vilonghorn.cli import main
from vilonghorn.cli.compare import differences, read_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    results = {}
    for name, options in (("a", ()), ("b", ("--optimizer.lr=4e-3", "--ema.decay=0"))):
        results[str(root / name)] = toy_trainer(root / name, "--schedule.epochs=2", *options).fit()
    return results


def test_the_command_prints_what_training_said_and_what_differs(runs, capsys):
    for path, result in runs.items():
        line = read_run(path)["row"]
        assert line["top-1"] == f"{result['top1']:.2f}" and line["loss"] == f"{result['loss']:.4f}"
        assert line["best top-1"] == f"{result['best']['top1']:.2f} (epoch {result['best']['epoch']})"
        assert line["epochs"] == "2/2" and line["images an update"] == "8" and float(line["images/s"]) > 0
    a, b = runs
    assert differences([read_run(path) for path in runs]) == [
        {"key": "optimizer.lr", a: "0.002", b: "0.004"},
        {"key": "ema.decay", a: "0.9", b: "0.0"},
    ]
    assert main(["compare", *runs]) == 0
    out = capsys.readouterr().out
    assert all(f"| {path} |" in out for path in runs) and "What differs" in out


def test_runs_in_progress_and_damaged_lines_are_read_as_far_as_they_go(tmp_path, capsys):
    trainer = toy_trainer(tmp_path, "--schedule.epochs=2")
    assert main(["compare", str(tmp_path)]) == 0
    assert "0/2" in capsys.readouterr().out
    trainer.fit()
    log = tmp_path / "log.jsonl"
    lines = log.read_bytes().split(b"\n")
    number = next(i for i, line in enumerate(lines) if b'"epoch": 1' in line and b'"kind": "epoch"' in line)
    lines[number] = lines[number][1:]
    log.write_bytes(b"\n".join(lines) + b'{"kind": "tr')
    assert read_run(str(tmp_path))["row"]["epochs"] == "2/2"


def test_what_is_no_run_is_named(runs, tmp_path, capsys):
    assert main(["compare", *runs, str(tmp_path)]) == 2
    assert f"{tmp_path} is not the directory of a run (FileNotFoundError: " in capsys.readouterr().err
    for name in ("config.yaml", "environment.json", "log.jsonl"):
        (tmp_path / name).write_text("[1]\n")
    assert main(["compare", str(tmp_path)]) == 2
    assert f"{tmp_path} is not the directory of a run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.yaml", "model: &a {kwargs: *a}"),
        ("environment.json", '{"processes": ' + "[" * 9000),
        ("environment.json", '{"processes": null}'),
        ("config.yaml", "model: {name: x}"),
        ("log.jsonl", '{"kind": "epoch", "epoch": 1, "model": {"top1": 1, "top5": 1, "loss": 1}}'),
        ("log.jsonl", '{"kind": "train", "images_per_second": "1"}\n{"kind": "train", "images_per_second": 2}'),
    ],
)
def test_a_run_of_a_stranger_is_read_within_bounds(runs, tmp_path, capsys, name, text):
    shutil.copytree(next(iter(runs)), tmp_path / "run")
    (tmp_path / "run" / name).write_text(text)
    assert main(["compare", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path}/run is not the directory of a run" in error and len(error.splitlines()) == 1
