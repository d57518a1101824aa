"""Shared directions and the two ablations against their equations, one token at a time, and what the constructor refuses."""

import pytest
import timm
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import vilonghorn  # noqa: F401  (registers the models)
from vilonghorn.layers import Mixer

FORMS = {
    "shared": dict(directions="shared"),
    "shared, exact": dict(rule="longhorn_exact", directions="shared"),
    "shared, mamba": dict(rule="mamba", directions="shared"),
    "scalar beta": dict(scalar_beta=True),
    "scalar beta, shared": dict(scalar_beta=True, directions="shared"),
    "learned A": dict(rule="mamba", learned_A=True),
    "learned A, shared": dict(rule="mamba", learned_A=True, directions="shared"),
}


def written_out(mixer, tokens):
    """The mixer's output from its parameters, by the equations."""
    shared, rank, N = mixer.scan_norm is not None, mixer.dt_rank, mixer.d_state
    x, z = F.linear(tokens, mixer.in_proj.weight).chunk(2, -1)
    total = 0
    for g, backwards in enumerate(mixer.reverse):
        s = 0 if shared else g
        turn = (lambda t: t.flip(1)) if backwards else (lambda t: t)
        u = x if shared else turn(x)  # the shared convolution runs forwards only
        taps = mixer.conv_weight[s][:, None]
        u = F.silu(F.conv1d(F.pad(u.mT, (taps.shape[-1] - 1, 0)), taps, mixer.conv_bias[s], groups=len(taps)).mT)
        u = turn(u) if shared else u
        low, k, q, *rates = F.linear(u, mixer.x_proj[s]).split([rank, N, N] + [N] * mixer.learned_A, -1)
        dt = F.linear(low, mixer.dt_proj[s], mixer.dt_bias[s])  # one number a token for a scalar beta
        state, outputs = u.new_zeros(len(u), u.shape[2], N), []
        for t in range(u.shape[1]):
            u_t, k_t, dt_t = u[:, t, :, None], k[:, t, None], dt[:, t, :, None]
            if mixer.rule == "mamba":
                exponent = -rates[0][:, t, None] if rates else -torch.exp(mixer.A_log[s])
                delta = F.softplus(dt_t)
                state = torch.exp(delta * exponent) * state + delta * u_t * k_t
            else:
                eps = 1 / (1 / torch.sigmoid(dt_t) + k_t.square().sum(-1, keepdim=True))
                recalled = state * k_t if mixer.rule == "longhorn" else (state * k_t).sum(-1, keepdim=True)
                state = state + eps * (u_t - recalled) * k_t
            outputs.append((state * q[:, t, None]).sum(-1) + mixer.D[s] * u[:, t])
        y = turn(torch.stack(outputs, 1))
        if shared:
            y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6) * mixer.scan_norm[g]
        total = total + y / (1 if shared else len(mixer.reverse))
    return F.linear(total * F.silu(z), mixer.out_proj.weight)


def make_mixer(dim=24, seed=0, **kwargs):
    torch.manual_seed(seed)
    mixer = Mixer(dim, dtype=torch.float64, **kwargs)
    with torch.no_grad():  # away from the start, where parts that are 0 or 1 would hide mistakes
        for name, parameter in mixer.named_parameters():
            if name in ("D", "dt_bias", "conv_bias", "scan_norm"):
                parameter.add_(torch.randn_like(parameter) * 0.5)
        mixer.x_proj.mul_(2)
    return mixer


@pytest.mark.parametrize("form", FORMS)
def test_a_form_and_all_its_gradients_equal_the_equations(form):
    mixer = make_mixer(**FORMS[form])
    tokens = torch.randn(2, 19, 24, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 19, 24, dtype=torch.float64)
    inputs = {"tokens": tokens, **dict(mixer.named_parameters())}
    ours, theirs = mixer(tokens), written_out(mixer, tokens)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)
    ours, theirs = (torch.autograd.grad((y * weight).sum(), list(inputs.values())) for y in (ours, theirs))
    for name, a, b in zip(inputs, ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")


@given(
    form=st.sampled_from(list(FORMS)),
    reverse=st.lists(st.booleans(), min_size=1, max_size=3),
    length=st.integers(1, 6),
    d_state=st.sampled_from([1, 3, 16]),
    d_conv=st.integers(1, 5),
)
def test_forms_equal_the_equations_at_every_shape(form, reverse, length, d_state, d_conv):
    mixer = make_mixer(dim=6, reverse=reverse, d_state=d_state, d_conv=d_conv, expand=3, **FORMS[form])
    tokens = torch.randn(2, length, 6, dtype=torch.float64)
    torch.testing.assert_close(mixer(tokens), written_out(mixer, tokens), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("form", FORMS)
def test_forms_in_float32_and_autocast_are_close_to_float64(form):
    mixer = make_mixer(**FORMS[form])
    tokens = torch.randn(2, 13, 24, dtype=torch.float64)
    expected = mixer(tokens).float()
    mixer, tokens = mixer.float(), tokens.float()
    torch.testing.assert_close(mixer(tokens), expected, rtol=1e-3, atol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        y = mixer(tokens)
    assert y.dtype == torch.bfloat16 and (y.float() - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize("form", FORMS)
def test_a_form_made_on_meta_is_whole_after_reset(form):
    mixer = Mixer(32, device="meta", **FORMS[form]).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.fill_(torch.nan)
    mixer.reset_parameters()
    assert all(torch.isfinite(parameter).all() for parameter in mixer.parameters())
    assert torch.isfinite(mixer(torch.randn(1, 5, 32))).all()


@pytest.mark.parametrize("form", FORMS)
def test_a_model_of_a_form_traces_and_trains(form):
    torch.manual_seed(0)
    model = timm.create_model("vilonghorn_nano", img_size=32, patch_size=8, depth=2, **FORMS[form])
    images = torch.randn(2, 3, 32, 32)
    names = timm.layers.get_graph_node_names(model)[1]
    traced = timm.layers.create_feature_extractor(model.eval(), return_nodes=[names[-1]])
    torch.testing.assert_close(next(iter(traced(images).values())), model(images))
    model.train()(images).square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_contradictory_forms_are_refused():
    with pytest.raises(ValueError, match="directions is 'both', expected one of 'separate', 'shared'"):
        Mixer(32, directions="both")
    with pytest.raises(ValueError, match="rule 'mamba' has no beta"):
        Mixer(32, rule="mamba", scalar_beta=True)
    with pytest.raises(ValueError, match="rule 'longhorn' has no A"):
        Mixer(32, learned_A=True)
