"""Candidates of a rule do the same work, and the roofline does as much."""

import pytest
import torch
from oracle import error, oracle

from vilonghorn.bench import candidates
from vilonghorn.bench.candidates import ROOFLINE, Workload
from vilonghorn.bench.interleaved import STEPS
from vilonghorn.ops import backends
from vilonghorn.ops.backends import cpu

WORKLOAD = Workload(2, 17, 6, 4)


def test_all_backends_of_a_rule_compute_the_same(monkeypatch):
    monkeypatch.setitem(candidates.WORKLOADS, "cpu", [WORKLOAD])
    [cells] = candidates.scan_candidates("cpu", threads=1)
    ready = {name for name, state in backends().items() if state == "ready"}
    assert {cell["backend"] for cell, _ in cells} == {candidates.LOOP, ROOFLINE} | {"cpu"} & ready
    for cell, make in cells:
        if cell["backend"] == ROOFLINE:
            continue
        inputs, _ = candidates.scan_inputs(cell["rule"], WORKLOAD, "cpu")
        expected, steps = oracle(**inputs, rule=cell["rule"]), make()
        y = steps[STEPS[False]]()
        assert not y.requires_grad and error(y.view_as(expected), expected) < 1e-6
        gradients = candidates.scan_steps(cell["rule"], "reference", WORKLOAD, "cpu")[STEPS[True]]()
        for actual, wanted in zip(steps[STEPS[True]](), gradients, strict=True):
            torch.testing.assert_close(actual.view_as(wanted), wanted, rtol=1e-4, atol=1e-5)


def test_two_directions_are_averaged():
    workload = WORKLOAD._replace(G=2)
    inputs, _ = candidates.scan_inputs("longhorn", workload, "cpu")
    y = candidates.scan_steps("longhorn", "reference", workload, "cpu")[STEPS[False]]()
    assert error(y, oracle(**inputs, rule="longhorn", reverse=(False, True), reduce="mean")) < 1e-6


@pytest.mark.skipif(not cpu.isas(), reason="the CPU kernels are not built")
@pytest.mark.parametrize(
    "rule, train, ms", [("longhorn", False, 1.1), ("longhorn_exact", False, 1.0), ("longhorn", True, 4.9)]
)
def test_the_roofline_does_the_multiply_adds_of_a_scan(rule, train, ms):
    slots = candidates.roofline_steps(rule, Workload(8, 197, 384, 16), "cpu", 2)[STEPS[train]]()
    assert slots / (117e9 / 2) * 1e3 == pytest.approx(ms, rel=0.04)  # at 117 GFLOP/s


def test_a_model_infers_without_and_learns_with_gradients(monkeypatch):
    made, create = [], candidates.timm.create_model
    monkeypatch.setattr(candidates.timm, "create_model", lambda *a, **k: made.append(create(*a, **k)) or made[-1])
    [(cell, make)] = candidates.model_candidates(["vilonghorn_nano"], 32, 2, "highest", "cpu", False)
    steps = make()
    assert cell == dict(model="vilonghorn_nano", size=32, batch=2, precision="highest", compiled=False)
    [model] = made
    seen = []
    model.head.register_forward_hook(lambda module, inputs, y: seen.append((model.training, y.requires_grad, y.shape)))
    model.head.weight.register_hook(lambda grad: seen.append(float(grad.norm())))
    steps[STEPS[False]]()
    assert seen == [(False, False, (2, 1000))]
    steps[STEPS[True]]()
    assert seen[1] == (True, True, (2, 1000)) and seen[2] > 0 and model.head.weight.grad is None


@pytest.mark.parametrize("device, batches", [("cpu", [8, 3, 2, 1, 1]), ("cuda", [128, 44, 24, 11, 4])])
def test_larger_images_come_in_smaller_batches(device, batches):
    cells = [
        candidates.model_candidates(["vim_tiny"], size, None, "highest", device, False)
        for size in (224, 384, 512, 768, 1248)
    ]
    assert [cell["batch"] for [(cell, _)] in cells] == batches
