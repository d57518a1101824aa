"""Models infer and learn."""

from functools import partialmethod

import candidates
import pytest
import torch
from interleaved import STEPS


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


def test_every_block_is_compiled_for_each_step(monkeypatch):
    """All blocks share one forward, of which torch compiles eight versions by default, then none."""
    monkeypatch.setattr(torch.nn.Module, "compile", partialmethod(torch.nn.Module.compile, backend="eager"))
    with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=True):
        steps = candidates.model_steps("vilonghornv2_tiny", 32, 1, "highest", "cpu", compiled=True)
        for step in steps.values():
            step()
