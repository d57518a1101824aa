"""What the kernels are held against computes the same scan, values and gradients."""

import pytest
import torch
from oracle import error, inputs, oracle

from vilonghorn.bench.torch import CHUNK, torch_chunked, torch_loop
from vilonghorn.ops.validate import RULES


@pytest.mark.parametrize("length", [9, CHUNK, 2 * CHUNK + 3])
@pytest.mark.parametrize("form", [torch_loop, torch_chunked])
@pytest.mark.parametrize("rule", RULES)
def test_scans_in_torch_compute_the_scan(rule, form, length):
    values = inputs(1, 2, length, 6, 16, rule=rule)
    expected = oracle(**values, rule=rule)[0]
    alone = {name: value if name == "z" else value[0] for name, value in values.items()}
    assert error(form(**alone, rule=rule), expected) < 1e-6


@pytest.mark.parametrize("rule", RULES)
def test_both_forms_have_the_same_gradients(rule):
    values = inputs(1, 2, CHUNK + 3, 6, 16, rule=rule)
    leaves = [(value if name == "z" else value[0]).double().requires_grad_() for name, value in values.items()]

    def gradients(form):
        return torch.autograd.grad(form(**dict(zip(values, leaves)), rule=rule).square().sum(), leaves)

    for loop, chunked in zip(gradients(torch_loop), gradients(torch_chunked)):
        torch.testing.assert_close(chunked, loop)
