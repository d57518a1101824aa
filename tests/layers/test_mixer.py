"""The mixer against Vim's block written out in plain torch, and its initialisation against the papers."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from vilonghorn.layers import Mixer

RULES = ("longhorn", "longhorn_exact", "mamba")


def state_update(rule, state, x, dt, k, A):
    """One token: state (B, D, N), x and dt (B, D), k (B, N), A (D, N)."""
    x, dt, k = x[..., None], dt[..., None], k[:, None]
    if rule == "mamba":
        delta = F.softplus(dt)
        return torch.exp(delta * A) * state + delta * x * k
    beta = torch.sigmoid(dt)
    eps = beta / (1 + beta * (k * k).sum(-1, keepdim=True))
    if rule == "longhorn":
        return (1 - eps * k * k) * state + eps * x * k
    return state + eps * (x - (state * k).sum(-1, keepdim=True)) * k


def vim_mixer(mixer, tokens):
    """Vim's block "v2": a branch on the sequence and one on its flip, gated each, summed and halved."""
    x, z = F.linear(tokens, mixer.in_proj.weight).chunk(2, dim=-1)
    width, rank, N = mixer.d_inner, mixer.dt_rank, mixer.d_state
    branches = []
    for g, flag in enumerate(mixer.reverse):
        u = x.flip(1) if flag else x
        taps = mixer.conv_weight[g][:, None]
        u = F.conv1d(u.transpose(1, 2), taps, mixer.conv_bias[g], padding=taps.shape[-1] - 1, groups=width)
        u = F.silu(u[..., : tokens.shape[1]]).transpose(1, 2)
        low, k, q = F.linear(u, mixer.x_proj[g]).split([rank, N, N], dim=-1)
        dt = F.linear(low, mixer.dt_proj[g], mixer.dt_bias[g])
        A = None if mixer.A_log is None else -torch.exp(mixer.A_log[g])
        state, outputs = u.new_zeros(len(u), width, N), []
        for t in range(u.shape[1]):
            state = state_update(mixer.rule, state, u[:, t], dt[:, t], k[:, t], A)
            outputs.append((state * q[:, t, None]).sum(-1) + mixer.D[g] * u[:, t])
        y = torch.stack(outputs, 1)
        branches.append((y.flip(1) if flag else y) * F.silu(z))
    return F.linear(sum(branches) / len(branches), mixer.out_proj.weight)


def make_mixer(rule, dtype=torch.float64, dim=24, seed=0, **kwargs):
    torch.manual_seed(seed)
    mixer = Mixer(dim, rule=rule, dtype=dtype, **kwargs)
    with torch.no_grad():  # away from the start, where parts that are 0 or 1 would hide mistakes
        for name in ("D", "dt_bias", "conv_bias"):
            getattr(mixer, name).add_(torch.randn_like(getattr(mixer, name)) * 0.5)
        mixer.x_proj.mul_(4)
    return mixer


@pytest.mark.parametrize("rule", RULES)
def test_mixer_equals_vims_block_in_plain_torch(rule):
    mixer = make_mixer(rule)
    tokens = torch.randn(2, 13, 24, dtype=torch.float64)
    torch.testing.assert_close(mixer(tokens), vim_mixer(mixer, tokens), rtol=1e-6, atol=1e-8)
    expected = vim_mixer(mixer, tokens).float()
    torch.testing.assert_close(mixer.float()(tokens.float()), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rule", RULES)
def test_gradients_of_every_parameter_equal_those_of_vims_block(rule):
    mixer = make_mixer(rule)
    tokens = torch.randn(2, 9, 24, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 9, 24, dtype=torch.float64)
    inputs = {"tokens": tokens, **dict(mixer.named_parameters())}
    ours = torch.autograd.grad((mixer(tokens) * weight).sum(), list(inputs.values()))
    theirs = torch.autograd.grad((vim_mixer(mixer, tokens) * weight).sum(), list(inputs.values()))
    for name, a, b in zip(inputs, ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7, msg=lambda m, name=name: f"{name}: {m}")


@given(
    rule=st.sampled_from(RULES),
    reverse=st.lists(st.booleans(), min_size=1, max_size=3),
    length=st.integers(1, 6),
    d_state=st.sampled_from([1, 3, 16]),
    d_conv=st.integers(1, 5),
    dt_rank=st.sampled_from([None, 1, 5]),
)
def test_mixer_equals_plain_torch_at_every_shape(rule, reverse, length, d_state, d_conv, dt_rank):
    mixer = make_mixer(rule, dim=6, reverse=reverse, d_state=d_state, d_conv=d_conv, dt_rank=dt_rank, expand=3)
    tokens = torch.randn(2, length, 6, dtype=torch.float64)
    torch.testing.assert_close(mixer(tokens), vim_mixer(mixer, tokens), rtol=1e-6, atol=1e-8)


def test_two_directions_see_the_whole_sequence_and_one_only_its_past():
    tokens = torch.randn(1, 8, 24, dtype=torch.float64)
    changed = tokens.clone()
    changed[:, 5] += 1
    for reverse, untouched in (((False,), range(5)), ((True,), range(6, 8)), ((False, True), ())):
        mixer = make_mixer("longhorn", reverse=reverse)
        same = [t for t in range(8) if torch.equal(mixer(tokens)[:, t], mixer(changed)[:, t])]
        assert same == list(untouched)


def test_longhorn_starts_with_a_gate_of_one_half_and_an_open_skip():
    mixer = Mixer(64, rule="longhorn")
    assert mixer.A_log is None
    assert torch.equal(mixer.dt_bias, torch.zeros(2, 128))
    assert torch.equal(mixer.D, torch.ones(2, 128))


def test_mamba_starts_with_its_own_decays_and_log_uniform_steps():
    mixer = Mixer(256, rule="mamba")
    assert torch.allclose(mixer.A_log.exp(), torch.arange(1.0, 17).expand(2, 512, 16))
    step = F.softplus(mixer.dt_bias.detach())
    assert 0.99e-3 < step.min() < 1.3e-3 and 0.08 < step.max() < 1.01e-1
    share = (step < 1e-2).float().mean()  # the geometric middle of the range
    assert abs(share - 0.5) < 0.08


@pytest.mark.parametrize("rule", RULES)
def test_linear_weights_start_uniform_at_the_scale_of_their_inputs(rule):
    mixer = Mixer(64, rule=rule, depth=9)
    bounds = {
        mixer.in_proj.weight: 1 / math.sqrt(64),
        mixer.conv_weight: 1 / math.sqrt(4),
        mixer.conv_bias: 1 / math.sqrt(4),
        mixer.x_proj: 1 / math.sqrt(128),
        mixer.dt_proj: 1 / math.sqrt(4),
        mixer.out_proj.weight: 1 / math.sqrt(128) / 3,
    }
    for weight, bound in bounds.items():
        assert 0.95 * bound < weight.abs().max() <= bound


@pytest.mark.parametrize("rule", RULES)
def test_a_mixer_made_on_meta_is_whole_after_reset(rule):
    mixer = Mixer(32, rule=rule, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.fill_(math.nan)
    mixer.reset_parameters()
    assert all(torch.isfinite(parameter).all() for parameter in mixer.parameters())
    assert torch.isfinite(mixer(torch.randn(1, 5, 32))).all()


def test_mixer_keeps_float32_inside_autocast_close_to_float32_outside():
    mixer = make_mixer("longhorn", dtype=torch.float32)
    tokens = torch.randn(2, 13, 24)
    expected = mixer(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        y = mixer(tokens)
    assert y.dtype == torch.bfloat16
    assert (y.float() - expected).abs().max() < 0.05 * expected.abs().max()


def test_an_unknown_rule_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'mambo'.*'longhorn', 'longhorn_exact', 'mamba'"):
        Mixer(32, rule="mambo")


def test_a_mixer_without_directions_is_refused():
    with pytest.raises(ValueError, match="reverse is empty"):
        Mixer(32, reverse=())
