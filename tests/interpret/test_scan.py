"""Implicit attention of a scan against the mixer's own output."""

import itertools

import pytest
import torch

from vilonghorn.interpret.scan import attention_rows, scan_inputs
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


def test_under_autocast_rows_are_float32_of_what_the_mixer_scans():
    mixer, tokens = made(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        scan = scan_inputs(mixer, tokens)
        rows = attention_rows(scan)
    assert {t.dtype for t in (*scan[2:7], scan.D, rows)} == {torch.float32}
    torch.testing.assert_close(rows, attention_rows(scan))
    torch.testing.assert_close(rows, attention_rows(scan_inputs(mixer, tokens)), rtol=0.1, atol=0.02)


@pytest.mark.parametrize("rule", RULES)
def test_rows_of_tokens_and_of_their_averages_are_those_of_every_row(rule):
    scan, queries = scan_of(rule), torch.eye(L)[[7, 0, 10]]
    queries[1] = torch.rand(L)
    every = attention_rows(scan, per_channel=True)
    expected = torch.einsum("tm,gbmsd->gbtsd", queries.double(), every)
    torch.testing.assert_close(attention_rows(scan, queries, per_channel=True), expected)
    torch.testing.assert_close(attention_rows(scan, queries), expected.abs().mean(-1))
    torch.testing.assert_close(attention_rows(scan), every.abs().mean(-1))
    assert every[0].flatten(3).abs().sum((0, 3)).triu(1).eq(0).all()  # forward: nothing from later tokens
    assert every[1].flatten(3).abs().sum((0, 3)).tril(-1).eq(0).all()


def test_mixers_without_a_scan_are_refused():
    with pytest.raises(ValueError, match="the mixer has rule 'none', expected one with a scan: longhorn, "):
        scan_inputs(*made(rule=None))
