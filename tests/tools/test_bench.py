"""The benchmark measures what it says: its baseline is the right recurrence, and its figures come out whole."""

import json

import pytest
import torch
from oracle import error, inputs, oracle

from vilonghorn.tools import bench


@pytest.mark.parametrize("rule", bench.RULES)
def test_the_torch_loop_computes_the_scan(rule):
    values = inputs(1, 2, 9, 6, 16, rule=rule)
    expected = oracle(**values, rule=rule)[0]
    alone = {name: value if name == "z" else value[0] for name, value in values.items()}
    assert error(bench.torch_loop(**alone, rule=rule), expected) < 1e-6


def test_contenders_take_turns():
    calls = []
    bench.measure({"a": lambda: calls.append("a") or torch.zeros(1), "b": lambda: calls.append("b")}, rounds=2)
    runs = [name for name, previous in zip(calls, [None, *calls]) if name != previous]
    assert runs == ["a", "b", "a", "b", "a", "b"]  # a warm-up, then two rounds


def test_the_command_prints_tables_and_writes_the_same_figures(tmp_path, capsys):
    threads = torch.get_num_threads()
    bench.main(["model", "--size", "32", "--batch", "1", "--rounds", "1", "--threads", "1", "--json", str(tmp_path / "bench.json")])
    torch.set_num_threads(threads)
    report = json.loads((tmp_path / "bench.json").read_text())
    printed = capsys.readouterr().out
    assert report["machine"]["threads"] == 1
    for table in report["tables"]:
        assert table["title"] in printed
        assert {"deit_tiny_patch16_224", "vilonghorn_tiny"} <= set(table["rows"])
        for row in table["rows"].values():
            assert f"{row['median_ms']:.2f}" in printed


def test_an_unknown_subject_is_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main(["scam"])
    assert stop.value.code == 2 and "expected scan or model" in capsys.readouterr().err
