"""The benchmark on a CPU measures what it says: its baseline is the right recurrence, its contenders take turns."""

import pytest
import torch
from oracle import error, inputs, oracle

from vilonghorn.ops.arguments import RULES
from vilonghorn.tools import bench_host


@pytest.mark.parametrize("rule", RULES)
def test_the_torch_loop_computes_the_scan(rule):
    values = inputs(1, 2, 9, 6, 16, rule=rule)
    expected = oracle(**values, rule=rule)[0]
    alone = {name: value if name == "z" else value[0] for name, value in values.items()}
    assert error(bench_host.torch_loop(**alone, rule=rule), expected) < 1e-6


def test_contenders_take_turns():
    calls = []
    bench_host.measure({"a": lambda: calls.append("a") or torch.zeros(1), "b": lambda: calls.append("b")}, rounds=2)
    runs = [name for name, previous in zip(calls, [None, *calls]) if name != previous]
    assert runs == ["a", "b", "a", "b", "a", "b"]  # a warm-up, then two rounds
