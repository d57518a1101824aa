"""Mamba with decay rates made of each token, against its equations."""

import pytest
import timm
import torch
from mixer_equations import make_mixer, written_out

from vilonghorn.study.ablations import LearnedAMixer


@pytest.mark.parametrize("directions", ["separate", "shared"])
def test_the_mixer_and_all_its_gradients_equal_the_equations(directions):
    mixer = make_mixer(kind=LearnedAMixer, directions=directions)
    tokens = torch.randn(2, 19, 24, dtype=torch.float64, requires_grad=True)
    inputs = {"tokens": tokens, **dict(mixer.named_parameters())}
    ours, theirs = mixer(tokens), written_out(mixer, tokens)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)
    ours, theirs = (torch.autograd.grad(y.square().sum(), list(inputs.values())) for y in (ours, theirs))
    for name, a, b in zip(inputs, ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")


def test_the_model_has_as_many_parameters_as_mamba_and_trains():
    model = timm.create_model("vim_nano_learned_a", img_size=32, depth=2)
    mamba = timm.create_model("vim_nano", img_size=32, depth=2)
    count = [sum(p.numel() for p in m.parameters()) for m in (model, mamba)]
    assert count[0] == count[1]  # (D, N) constants for an (N, D) projection
    assert model.blocks[0].mixer.A_log is None
    model(torch.randn(2, 3, 32, 32)).square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_another_rule_is_refused():
    with pytest.raises(ValueError, match="rule is 'longhorn', expected 'mamba'"):
        LearnedAMixer(32, rule="longhorn")
