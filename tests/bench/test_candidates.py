"""Candidates of a rule do the same work, and models infer and learn."""

import pytest
import torch
from oracle import error, oracle

from vilonghorn.bench import candidates
from vilonghorn.bench.candidates import Workload
from vilonghorn.bench.interleaved import STEPS
from vilonghorn.ops import backends

WORKLOAD = Workload(2, 17, 6, 4)


def test_all_backends_of_a_rule_compute_the_same(monkeypatch):
    monkeypatch.setitem(candidates.WORKLOADS, "cpu", WORKLOAD)
    cells = candidates.scan_candidates("cpu")
    ready = {name for name, state in backends().items() if state == "ready"}
    assert {cell["backend"] for cell, _ in cells} == ready and cells[0][0]["backend"] == "reference"
    gradients = {}
    for cell, make in cells:
        inputs, _ = candidates.scan_inputs(cell["rule"], WORKLOAD, "cpu")
        expected, steps = oracle(**inputs, rule=cell["rule"]), make()
        y = steps[STEPS[False]]()
        assert not y.requires_grad and error(y, expected) < 1e-6
        wanted = gradients.setdefault(cell["rule"], steps[STEPS[True]]())
        torch.testing.assert_close(steps[STEPS[True]](), wanted, rtol=1e-4, atol=1e-5)


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
