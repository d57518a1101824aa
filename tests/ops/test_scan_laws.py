"""Laws of the scan that hold for all inputs, whatever runs it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import KERNEL_RULES, inputs

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
def test_reverse_equals_flipped_input_and_output(rule, backend, B, L, D, N, key_scale, seed):
    values = inputs(1, B, L, D, N, rule=rule, seed=seed, dtype=torch.float64, key_scale=key_scale)
    flipped = {n: v.flip(-2) if n in ("x", "dt", "k", "q", "z") else v for n, v in values.items()}
    forward = scan(**flipped, rule=rule, reverse=(False,), backend=backend)
    close(scan(**values, rule=rule, reverse=(True,), backend=backend), forward.flip(2))


@cases
def test_a_direction_does_not_see_the_other(rule, backend, B, L, D, N, key_scale, seed):
    values = inputs(2, B, L, D, N, rule=rule, seed=seed, dtype=torch.float64, key_scale=key_scale)
    both = scan(**values, rule=rule, reverse=(False, True), backend=backend)
    for g, flag in enumerate((False, True)):
        alone = {n: v if n == "z" else v[g : g + 1] for n, v in values.items()}
        close(scan(**alone, rule=rule, reverse=(flag,), backend=backend)[0], both[g])


@cases
def test_the_mean_is_the_mean_of_the_directions(rule, backend, B, L, D, N, key_scale, seed):
    values = inputs(2, B, L, D, N, rule=rule, seed=seed, dtype=torch.float64, key_scale=key_scale)
    options = dict(rule=rule, reverse=(True, False), backend=backend)
    close(scan(**values, **options, reduce="mean"), scan(**values, **options).mean(0))


@cases
def test_the_scan_is_linear_in_x_for_fixed_gates(rule, backend, B, L, D, N, key_scale, seed):
    values = inputs(1, B, L, D, N, rule=rule, seed=seed, dtype=torch.float64, key_scale=key_scale)
    other = inputs(1, B, L, D, N, rule=rule, seed=seed + 1, dtype=torch.float64)["x"]

    def run(x):
        return scan(**values | dict(x=x), rule=rule, backend=backend)

    close(run(2 * values["x"] - 3 * other), 2 * run(values["x"]) - 3 * run(other))


@cases
def test_a_token_changes_nothing_before_it(rule, backend, B, L, D, N, key_scale, seed):
    values = inputs(1, B, L, D, N, rule=rule, seed=seed, dtype=torch.float64, key_scale=key_scale)
    t = seed % L
    changed = {n: v.clone() for n, v in values.items()}
    for name in ("x", "dt", "k", "q"):
        changed[name][:, :, t:] += 1
    before = scan(**values, rule=rule, backend=backend)[:, :, :t]
    assert torch.equal(scan(**changed, rule=rule, backend=backend)[:, :, :t], before)


@cases
def test_exact_equals_diagonal_when_the_state_has_one_number(rule, backend, B, L, D, N, key_scale, seed):
    values = inputs(1, B, L, D, 1, rule="longhorn", seed=seed, dtype=torch.float64, key_scale=key_scale)
    close(scan(**values, rule="longhorn_exact", backend=backend), scan(**values, rule="longhorn", backend=backend))


@cases
def test_the_longhorn_state_is_bounded_by_the_largest_value_over_the_smallest_key(
    rule, backend, B, L, D, N, key_scale, seed
):
    """Each diagonal update moves s_n towards x / k_n: with |k_n| >= m and |x| <= M, |s_n| <= M / m for ever."""
    values = inputs(1, B, L, D, N, rule="longhorn", gate=False, seed=seed, dtype=torch.float64, key_scale=key_scale)
    smallest = 0.05
    values["k"] = values["k"] + smallest * torch.where(values["k"] < 0, -1.0, 1.0)
    bound = values["x"].abs().max() / smallest
    for n in range(N):
        values["q"] = torch.zeros_like(values["q"])
        values["q"][..., n] = 1  # reads s_n itself
        assert scan(**values, rule="longhorn", backend=backend).abs().max() <= bound * (1 + 1e-9)


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


@pytest.mark.parametrize("rule", KERNEL_RULES)
def test_the_backends_agree_with_each_other(rule):
    if len(BACKENDS) < 2:
        pytest.skip("one backend only")
    values = inputs(2, 2, 70, 30, 16, rule=rule)
    results = [scan(**values, rule=rule, reverse=(False, True), backend=name) for name in BACKENDS]
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-5)
