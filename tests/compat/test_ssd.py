"""Mamba2 of `vilonghorn.compat` and its functions against plain loops in float64."""

import plain_mamba as plain
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from vilonghorn.compat import ssd

H, P, L = 4, 3, 7


def inputs(groups=1, states=5, seed=0, D_of_channels=False, **absent):
    generator = torch.Generator().manual_seed(seed)
    shapes = dict(x=(2, L, H, P), dt=(2, L, H), A=(H,), B=(2, L, groups, states), C=(2, L, groups, states))
    shapes |= dict(D=(H, P) if D_of_channels else (H,), z=(2, L, H, P), dt_bias=(H,))
    tensors = {n: torch.randn(*shape, generator=generator) for n, shape in shapes.items()}
    return tensors | dict(A=-tensors["A"].abs()) | dict.fromkeys(absent)


@settings(max_examples=20, deadline=None)
@given(
    groups=st.sampled_from([1, 2, 4]),
    states=st.sampled_from([1, 5, 70]),
    D_of_channels=st.booleans(),
    absent=st.sets(st.sampled_from(["D", "z", "dt_bias"])),
    softplus=st.booleans(),
    limit=st.sampled_from([(0.0, float("inf")), (0.1, 0.5)]),
    seed=st.integers(0, 100),
)
def test_values_and_gradients_of_every_form(groups, states, D_of_channels, absent, softplus, limit, seed):
    options = dict(dt_softplus=softplus, dt_limit=limit)
    plain.agree(
        lambda **t: ssd.mamba_chunk_scan_combined(**t, chunk_size=64, **options),
        lambda **t: plain.chunk_scan(**t, **options)[0],
        inputs(groups, states, seed, D_of_channels, **dict.fromkeys(absent)),
    )


@pytest.mark.parametrize("states", [5, 256])
def test_states_are_carried_with_their_gradients(states):
    options = dict(dt_softplus=True)
    plain.agree(
        lambda **t: ssd.mamba_chunk_scan_combined(**t, return_final_states=True, **options),
        lambda initial_states, **t: plain.chunk_scan(**t, state=initial_states, **options),
        inputs(2, states) | dict(initial_states=torch.randn(2, H, P, states)),
    )


@pytest.mark.parametrize("rmsnorm", [True, False])
@pytest.mark.parametrize("options", [{}, dict(d_ssm=8, D_has_hdim=True, ngroups=2, norm_before_gate=True, bias=True)])
def test_the_mixer_has_the_parameters_of_mamba_ssm_and_their_values(rmsnorm, options):
    mixer = ssd.Mamba2(8, d_state=5, headdim=4, rmsnorm=rmsnorm, dt_limit=(0.01, 1.0), **options)
    names = {"dt_bias", "A_log", "D", "in_proj.weight", "conv1d.weight", "conv1d.bias", "out_proj.weight"}
    names |= {"norm.weight"} if rmsnorm else set()
    assert set(mixer.state_dict()) == (names | {"in_proj.bias", "out_proj.bias"} if options else names)
    for parameter in mixer.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    dim, G = options.get("d_ssm", 16), options.get("ngroups", 1)

    def loops(x, **p):
        rows = x @ p["in_proj.weight"].mT + p.get("in_proj.bias", 0)
        extra = 16 - dim
        gate, value, z, xBC, dt = rows.split((extra, extra, dim, dim + 10 * G, dim // 4), -1)
        xBC = plain.causal_conv1d(xBC.mT, p["conv1d.weight"][:, 0], p["conv1d.bias"], activation="silu").mT
        u, B, C = xBC.split((dim, 5 * G, 5 * G), -1)
        heads = (t.reshape(2, L, n, -1) for t, n in ((u, dim // 4), (B, G), (C, G)))
        u, B, C = heads
        D = p["D"].reshape(-1, 4) if options else p["D"]
        y, _ = plain.chunk_scan(u, dt, -p["A_log"].exp(), B, C, D, None, p["dt_bias"], True, (0.01, 1.0))
        y = y.reshape(2, L, dim)
        if not rmsnorm:
            y = y * F.silu(z)
        else:
            before = options.get("norm_before_gate", False)
            y = (y if before else y * F.silu(z)).reshape(2, L, G, -1)
            y = (y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt()).reshape(2, L, dim) * p["norm.weight"]
            y = y * F.silu(z) if before else y
        return torch.cat([F.silu(gate) * value, y], -1) @ p["out_proj.weight"].mT + p.get("out_proj.bias", 0)

    def function(x, **p):
        return torch.func.functional_call(mixer, p, (x,))

    x = torch.randn(2, L, 8)
    plain.agree(function, loops, dict(x=x, **mixer.state_dict()), 4e-6)
    assert torch.equal(mixer(x.flatten(0, 1), seqlen=L), mixer(x).flatten(0, 1))
    plain.close(torch.compile(mixer, fullgraph=True, backend="aot_eager")(x), mixer(x))


def test_what_does_not_fit_has_a_sentence():
    for name in ("seq_idx", "cu_seqlens"):
        with pytest.raises(NotImplementedError, match="packed sequences"):
            ssd.mamba_chunk_scan_combined(**inputs(), chunk_size=4, **{name: torch.zeros(1)})
    with pytest.raises(ValueError, match=r"C has shape \(2, 7, 1, 5\), expected \(2, 7, 2, 5\)"):
        ssd.mamba_chunk_scan_combined(**inputs(2) | dict(C=torch.zeros(2, 7, 1, 5)), chunk_size=4)
    with pytest.raises(ValueError, match="B has 3 groups, expected a divisor"):
        ssd.mamba_chunk_scan_combined(**inputs(3), chunk_size=4)
    with pytest.raises(NotImplementedError, match="process_group"):
        ssd.Mamba2(8, process_group=object())
