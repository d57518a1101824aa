"""`vilonghorn.ops.decomposed`: the operators as torch's own."""

import pytest
import timm
import torch
from own_operators import OwnOperators

import vilonghorn  # noqa: F401
from vilonghorn.ops import decomposed


@pytest.mark.parametrize("name", ["vim_nano", "vilonghorn_nano_shared", "vilonghornv2_nano"])
def test_a_model_and_its_gradients_are_the_same_in_torchs_operators(name):
    model = timm.create_model(name, depths=(1, 1, 1)) if "v2" in name else timm.create_model(name, depth=2)
    model.eval().double()
    images = torch.randn(1, *model.default_cfg["input_size"], dtype=torch.float64)
    results = []
    for context in (torch.enable_grad(), decomposed()):
        model.zero_grad()
        with OwnOperators() as own, context:
            scores = model(images)
            scores.square().sum().backward()
        results.append([scores.detach(), *(p.grad.clone() for p in model.parameters())])
        assert bool(own.names) == (len(results) == 1)
    torch.testing.assert_close(*results)
