"""The loop in torch does the work of the scan, and the roofline does as much."""

import pytest
import torch
from interleaved import STEPS
from oracle import error, oracle

from vilonghorn.ops.rules import RULES


@pytest.fixture
def scan(script):
    return script("benchmarks/scan")


@pytest.fixture
def small(scan):
    return scan.Workload(2, 17, 6, 4)


@pytest.mark.parametrize("rule", RULES)
def test_the_loop_computes_what_the_scan_does(scan, small, rule):
    inputs, _ = scan.scan_inputs(rule, small, "cpu")
    steps = scan.steps(rule, scan.LOOP, small, "cpu")
    assert error(steps[STEPS[False]](), oracle(**inputs, rule=rule)[0]) < 1e-6
    gradients = scan.scan_steps(rule, "reference", small, "cpu")[STEPS[True]]()
    for actual, wanted in zip(steps[STEPS[True]](), gradients, strict=True):
        torch.testing.assert_close(actual.view_as(wanted), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "rule, train, ms", [("longhorn", False, 1.1), ("longhorn_exact", False, 1.0), ("longhorn", True, 4.9)]
)
def test_the_roofline_does_the_multiply_adds_of_a_scan(scan, rule, train, ms):
    product = scan.roofline_steps(rule, scan.WORKLOADS["cpu"][0], "cpu")[STEPS[train]]()
    assert product.numel() * 512 / (117e9 / 2) * 1e3 == pytest.approx(ms, rel=0.04)  # at 117 GFLOP/s


def test_a_scan_is_compared_to_the_loop_and_the_roofline(scan):
    cell = dict(workload="B=8", rule="mamba", train=False)
    times = {"torch loop": [8.0] * 3, "roofline": [1.0, 2.0, 2.0], "cpu": [2.0, 4.0, 1.0]}
    rows = [cell | dict(backend=name, ms=ms) for name, ms in times.items()]
    assert list(scan.table(rows)[-1].values()) == ["B=8", "mamba", "cpu", "2.00", "4.0", "2.00"]
    [line] = scan.table(rows[-1:])
    assert list(line.values()) == ["B=8", "mamba", "cpu", "2.00", "-"]
