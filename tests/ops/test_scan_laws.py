"""Laws of the scan that hold for all inputs, whatever runs it."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import KERNEL_RULES, inputs, oracle

from vilonghorn.ops import backends, scan

BACKENDS = [name for name in ("cpu", "reference") if backends("cpu")[name] == "ready"]
cases = given(
    rule=st.sampled_from(KERNEL_RULES),
    backend=st.sampled_from(BACKENDS),
    B=st.integers(1, 3),
    L=st.integers(1, 40),
    D=st.integers(1, 35),
    N=st.sampled_from([1, 2, 7, 16, 20]),
    key_scale=st.sampled_from([0.1, 1.0, 5.0]),
    seed=st.integers(0, 2**31),
)


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@cases
def test_a_scan_agrees_with_the_oracle_at_every_shape(rule, backend, B, L, D, N, key_scale, seed):
    reverse = ((False,), (True,), (False, True), (True, False, True))[seed % 4]
    values = inputs(len(reverse), B, L, D, N, rule=rule, seed=seed, dtype=torch.float64, key_scale=key_scale)
    options = dict(rule=rule, reverse=reverse, reduce=("none", "mean")[seed // 4 % 2])
    close(scan(**values, **options, backend=backend), oracle(**values, **options))


@cases
def test_the_exact_update_solves_the_online_regression(rule, backend, B, L, D, N, key_scale, seed):
    """s minimises |s - s_prev|^2 + beta (s.k - x)^2: the gradient of that objective vanishes at every step."""
    values = inputs(
        1, B, L, D, N, rule="longhorn_exact", gate=False, seed=seed, dtype=torch.float64, key_scale=key_scale
    )
    states = []
    for n in range(N):
        values["q"] = torch.zeros_like(values["q"])
        values["q"][..., n] = 1
        states.append(scan(**values, rule="longhorn_exact", backend=backend))
    s = torch.stack(states, -1)  # (1, B, L, D, N)
    previous = torch.nn.functional.pad(s, (0, 0, 0, 0, 1, 0))[:, :, :-1]
    k, beta = values["k"].unsqueeze(3), torch.sigmoid(values["dt"]).unsqueeze(-1)
    gradient = (s - previous) + beta * ((s * k).sum(-1, keepdim=True) - values["x"].unsqueeze(-1)) * k
    assert gradient.abs().max() < 1e-9 * (1 + s.abs().max()) * (1 + k.abs().max()) ** 2


@cases
def test_a_scan_cut_anywhere_and_continued_equals_the_whole(rule, backend, B, L, D, N, key_scale, seed):
    reverse = ((False,), (True,), (False, True))[seed % 3]
    values = inputs(
        len(reverse), B, L, D, N, rule=rule, state=True, seed=seed, dtype=torch.float64, key_scale=key_scale
    )
    state, options = values.pop("initial_state"), dict(rule=rule, backend=backend, return_state=True)
    y, last = scan(**values, **options, reverse=reverse, initial_state=state)
    for g, flag in enumerate(reverse):
        cuts = sorted({0, seed % (L + 1), seed // 7 % (L + 1), L})
        pieces = list(zip(cuts, cuts[1:]))
        s = state[g : g + 1]
        for start, stop in reversed(pieces) if flag else pieces:
            piece = {name: t[g : g + 1, :, start:stop] for name, t in values.items() if name in ("x", "dt", "k", "q")}
            piece |= {name: t[g : g + 1] for name, t in values.items() if name in ("A", "D", "dt_bias")}
            z = values["z"][:, start:stop]
            part, s = scan(**piece, **options, z=z, reverse=(flag,), initial_state=s)
            close(part, y[g : g + 1, :, start:stop])
        close(s, last[g : g + 1])
