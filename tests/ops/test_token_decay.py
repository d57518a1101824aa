"""The ablation's scan as an operator: its contract with torch, and gradients by finite differences."""

import torch
from torch.library import opcheck

from vilonghorn.ops import token_decay


def values(L, G=2, B=1, D=3, N=2):
    generator = torch.Generator().manual_seed(0)
    shapes = dict(x=(G, B, L, D), delta=(G, B, L, D), A=(G, B, L, N), k=(G, B, L, N), q=(G, B, L, N))
    made = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    made["delta"] = made["delta"].abs()
    return [value.requires_grad_() for value in made.values()]


def test_gradients_are_those_of_finite_differences_across_saved_states():
    assert torch.autograd.gradcheck(lambda *args: token_decay._scan(*args, True)[0], values(token_decay.CHUNK + 3))


def test_the_operator_keeps_torchs_rules():
    for L in (1, token_decay.CHUNK, 2 * token_decay.CHUNK + 1):
        opcheck(token_decay._scan, (*values(L), True))
        opcheck(token_decay._scan, (*(v.detach() for v in values(L)), False))


def test_no_token_is_no_error():
    assert token_decay._scan(*values(0), True)[0].shape == (2, 1, 0, 3)
