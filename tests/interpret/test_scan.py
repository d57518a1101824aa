"""Implicit attention and memory of a scan against the float64 oracle, which knows only the recurrence."""

import pytest
import torch
from oracle import convolution, mixer_inputs, oracle
from oracle import mixer as oracle_mixer

from vilonghorn.interpret.scan import attention_rows, half_life, retention, scan_inputs
from vilonghorn.layers import Mixer

RULES = ("longhorn", "longhorn_exact", "mamba")
REVERSES = ((False, True), (True,), (False,), (True, True, False))
B, L, D, N, R, K, DIM = 2, 11, 6, 4, 3, 4, 3


def made(rule, reverse=(False, True), dtype=torch.float64):
    """A mixer with arbitrary weights, tokens for it, and the oracle's arguments of the same."""
    values = mixer_inputs(len(reverse), B, L, D, N, R, K, rule=rule, dim=DIM, dtype=dtype)
    mixer = Mixer(DIM, rule=rule, reverse=reverse, d_state=N, d_conv=K, dt_rank=R, expand=D // DIM, dtype=dtype)
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randn(B, L, DIM, generator=generator, dtype=torch.float64).to(dtype)
    in_proj = torch.randn(2 * D, DIM, generator=generator, dtype=torch.float64).to(dtype)
    with torch.no_grad():
        for name in ("conv_weight", "conv_bias", "x_proj", "dt_proj", "dt_bias", "D"):
            getattr(mixer, name).copy_(values[name])
        mixer.in_proj.weight.copy_(in_proj)
        mixer.out_proj.weight.copy_(values["out_proj"])
        if rule == "mamba":
            mixer.A_log.copy_((-values["A"]).log())
    values["xz"] = tokens @ in_proj.mT
    return mixer, tokens, values


def scan_of_oracle(values, rule, reverse):
    """y of every direction, (G, B, L, D), and the values that it is linear in, both by the oracle's equations."""
    x, _ = values["xz"].double().split(D, dim=-1)
    u = convolution(x, values["conv_weight"], values["conv_bias"], reverse)
    low, k, q = torch.einsum("gbld,gpd->gblp", u, values["x_proj"].double()).split([R, N, N], dim=-1)
    dt = torch.einsum("gblr,gdr->gbld", low, values["dt_proj"].double())
    rest = dict(A=values.get("A"), D=values["D"], dt_bias=values["dt_bias"], rule=rule, reverse=reverse)
    return oracle(u, dt, k, q, **rest), u


@pytest.mark.parametrize("reverse", REVERSES)
@pytest.mark.parametrize("rule", RULES)
def test_rows_times_the_values_are_the_scan_and_the_whole_layer(rule, reverse):
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 2e-5)):
        mixer, tokens, values = made(rule, reverse, dtype)
        scan = scan_inputs(mixer, tokens)
        rows = attention_rows(scan, per_channel=True).double()
        expected, u = scan_of_oracle(values, rule, reverse)
        y = torch.einsum("gbtsd,gbsd->gbtd", rows, u) + values["D"].double()[:, None, None] * u
        torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)
        z = scan.z.double()
        layer = (y.mean(0) * z * torch.sigmoid(z)) @ values["out_proj"].double().mT
        whole = oracle_mixer(**values, rule=rule, reverse=reverse)
        torch.testing.assert_close(layer, whole, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(mixer(tokens).double(), whole, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rule", RULES)
def test_chosen_rows_and_averages_are_those_of_every_row(rule):
    scan = scan_inputs(*made(rule)[:2])
    every = attention_rows(scan, per_channel=True)
    queries = [7, 0, 10, 3]
    assert torch.equal(attention_rows(scan, queries, per_channel=True), every[:, :, queries])
    torch.testing.assert_close(attention_rows(scan, queries), every[:, :, queries].abs().mean(-1))
    torch.testing.assert_close(attention_rows(scan), every.abs().mean(-1))
    assert every[0].flatten(3).abs().sum((0, 3)).triu(1).eq(0).all()  # forward: nothing from later tokens
    assert every[1].flatten(3).abs().sum((0, 3)).tril(-1).eq(0).all()


@pytest.mark.parametrize("queries, message", [([11], "from 0 to 10"), ([-1], "from 0 to 10"), ([2, 2], "different")])
def test_queries_outside_the_sequence_are_refused(queries, message):
    with pytest.raises(ValueError, match=message):
        attention_rows(scan_inputs(*made("longhorn")[:2]), queries)


@pytest.mark.parametrize("rule", RULES)
def test_what_is_left_of_a_token_is_what_the_matrices_of_later_tokens_leave(rule):
    scan = scan_inputs(*made(rule)[:2])
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


FORMS = {
    "shared": dict(shared_directions=True),
    "shared, exact": dict(rule="longhorn_exact", shared_directions=True, reverse=(True, False, True)),
    "shared, mamba": dict(rule="mamba", shared_directions=True),
    "scalar beta": dict(num_heads=1),
    "scalar beta, shared": dict(num_heads=1, shared_directions=True),
}


@pytest.mark.parametrize("form", FORMS)
def test_rows_reproduce_the_layer_in_every_form(form):
    torch.manual_seed(0)
    mixer = Mixer(DIM, d_state=N, d_conv=K, dt_rank=R, expand=D // DIM, dtype=torch.float64, **FORMS[form])
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    tokens = torch.randn(B, L, DIM, dtype=torch.float64)
    scan = scan_inputs(mixer, tokens)
    y = torch.einsum("gbtsd,gbsd->gbtd", attention_rows(scan, per_channel=True), scan.values)
    y = y + scan.D[:, None, None] * scan.values
    if mixer.scan_norm is None:
        y = y.mean(0)
    else:
        scales = torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
        y = sum(y_g * scale * weight for y_g, scale, weight in zip(y, scales, mixer.scan_norm))
    layer = (y * scan.z * torch.sigmoid(scan.z)) @ mixer.out_proj.weight.mT
    torch.testing.assert_close(layer, mixer(tokens), rtol=1e-9, atol=1e-10)


def test_half_life_ends_with_the_first_token_that_finds_less_than_half_even_if_a_state_grows_again():
    share = torch.tensor([[1, 0, 0, 0], [0.6, 1, 0, 0], [0.4, 2, 1, 0], [0.9, 0.7, 0.2, 1]]).view(1, 1, 4, 4)
    assert half_life(share, (False,)).flatten().tolist() == [2, torch.inf, 1, torch.inf]


def test_half_life_counts_the_tokens_that_find_half_or_more():
    share = torch.zeros(2, 1, 4, 4)
    share[0, 0] = torch.tensor([[1, 0, 0, 0], [0.6, 1, 0, 0], [0.5, 0.4, 1, 0], [0.4, 0.2, 0.7, 1]])
    share[1] = share[0].flip(1, 2)
    expected = torch.tensor([3, 1, torch.inf, torch.inf])
    assert torch.equal(half_life(share, (False, True))[:, 0], torch.stack([expected, expected.flip(0)]))
