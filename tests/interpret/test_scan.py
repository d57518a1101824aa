"""Implicit attention and memory of a scan against the mixer's own output and the matrices of each token."""

import itertools

import pytest
import torch

from vilonghorn.interpret.scan import attention_rows, half_life, retention, scan_inputs
from vilonghorn.layers import Mixer

RULES = ("longhorn", "longhorn_exact", "mamba")
REVERSES = ((False, True), (True,), (True, True, False))
B, L, D, N, DIM = 2, 11, 6, 4, 3


def made(dtype=torch.float64, **options):
    """A mixer with arbitrary weights, and tokens for it."""
    torch.manual_seed(0)
    mixer = Mixer(DIM, d_state=N, d_conv=4, dt_rank=3, expand=D // DIM, **options).double()
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return mixer.to(dtype), torch.randn(B, L, DIM, dtype=torch.float64).to(dtype)


def scan_of(rule):
    return scan_inputs(*made(rule=rule))


FORMS = [dict(rule=rule, reverse=reverse) for rule, reverse in itertools.product(RULES, REVERSES)] + [
    dict(shared_directions=True),
    dict(rule="longhorn_exact", shared_directions=True, reverse=(True, False, True)),
    dict(rule="mamba", shared_directions=True),
    dict(num_heads=2),
    dict(num_heads=1, shared_directions=True),
]


@pytest.mark.parametrize("form", FORMS, ids=str)
@torch.no_grad()
def test_rows_times_the_values_reproduce_the_layer(form):
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 2e-5)):
        mixer, tokens = made(dtype, **form)
        scan = scan_inputs(mixer, tokens)
        y = torch.einsum("gbtsd,gbsd->gbtd", attention_rows(scan, per_channel=True), scan.values)
        y = y + scan.D[:, None, None] * scan.values
        if mixer.scan_norm is None:
            y = y.mean(0)
        else:
            scales = torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
            y = sum(y_g * scale * weight for y_g, scale, weight in zip(y, scales, mixer.scan_norm))
        layer = (y * scan.z * torch.sigmoid(scan.z)) @ mixer.out_proj.weight.mT
        torch.testing.assert_close(layer, mixer(tokens), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rule", RULES)
def test_chosen_rows_and_averages_are_those_of_every_row(rule):
    scan, queries = scan_of(rule), [7, 0, 10, 3]
    every = attention_rows(scan, per_channel=True)
    assert torch.equal(attention_rows(scan, queries, per_channel=True), every[:, :, queries])
    torch.testing.assert_close(attention_rows(scan, queries), every[:, :, queries].abs().mean(-1))
    torch.testing.assert_close(attention_rows(scan), every.abs().mean(-1))
    assert every[0].flatten(3).abs().sum((0, 3)).triu(1).eq(0).all()  # forward: nothing from later tokens
    assert every[1].flatten(3).abs().sum((0, 3)).tril(-1).eq(0).all()


def test_queries_outside_the_sequence_and_mixers_without_a_scan_are_refused():
    for queries in ([11], [-1], [2, 2]):
        with pytest.raises(ValueError, match="expected different positions from 0 to 10"):
            attention_rows(scan_of("longhorn"), queries)
    with pytest.raises(ValueError, match="the mixer has rule 'none', expected one with a scan: longhorn, "):
        scan_inputs(*made(rule=None))


@pytest.mark.parametrize("rule", RULES)
def test_what_is_left_of_a_token_is_what_the_matrices_of_later_tokens_leave(rule):
    scan = scan_of(rule)
    kept = retention(scan)
    eye = torch.eye(N, dtype=torch.float64)
    for g, flag in enumerate(scan.reverse):
        order = list(range(L))[:: -1 if flag else 1]
        for b in range(B):
            expected = torch.zeros(L, L, dtype=torch.float64)
            for channel in range(D):
                for start, s in enumerate(order):
                    left = scan.k[g, b, s]
                    for t in order[start:]:
                        k, gate = scan.k[g, b, t], scan.gate[g, b, t, channel]
                        if t != s and rule == "longhorn":
                            left = (eye - gate * torch.diag(k * k)) @ left
                        elif t != s and rule == "longhorn_exact":
                            left = (eye - gate * torch.outer(k, k)) @ left
                        elif t != s:
                            left = torch.diag(torch.exp(gate * scan.A[g, channel])) @ left
                        expected[t, s] += left.norm() / scan.k[g, b, s].norm() / D
            torch.testing.assert_close(kept[g, b], expected, rtol=1e-10, atol=1e-12)


def test_half_life_counts_the_tokens_until_the_first_that_finds_less_than_half():
    share = torch.zeros(2, 1, 4, 4)
    share[0, 0] = torch.tensor([[1, 0, 0, 0], [0.6, 1, 0, 0], [0.5, 0.4, 1, 0], [0.4, 2, 0.7, 1]])  # grows again
    share[1] = share[0].flip(1, 2)
    expected = torch.tensor([3, 1, torch.inf, torch.inf])
    assert torch.equal(half_life(share, (False, True))[:, 0], torch.stack([expected, expected.flip(0)]))
