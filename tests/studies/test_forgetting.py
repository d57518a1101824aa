"""What a key's component beside the common direction overwrites, and what is kept where it is removed."""

from __future__ import annotations

import math

import pytest
import torch
from forgetting import changed_keys, principal, split, without_small
from study import mixers

pytest.importorskip("sklearn", reason="the values are the digits that come with scikit-learn")


def test_shares_are_those_beside_the_vector_along_which_most_keys_lie():
    angles = torch.tensor([[0.0, 0.1, -0.1, 0.3, -0.3], [1.0, 1.1, 0.9, 1.0, 1.0]])  # of two directions
    k = 7 * torch.stack([angles.cos(), angles.sin()], -1)[:, None, None]
    common = principal(k)
    centre = torch.tensor([0.0, 1.0])
    assert (common[..., 0].flatten() * centre.cos() + common[..., 1].flatten() * centre.sin()).abs() == pytest.approx(
        [1, 1], abs=1e-6
    )
    along, share = split(k, common)
    assert torch.allclose(share[:, 0, 0, :, 0], (angles - centre[:, None]).sin().square(), atol=1e-6)
    assert torch.allclose((k - along).square().sum(-1), 49 * share[..., 0], atol=1e-4)


@pytest.mark.parametrize("threshold, kept", [(0, (1 - 2e-3) ** 500), (1e-4, (1 - 2e-3) ** 500), (0.01, 1)])
def test_distractors_overwrite_what_lies_beside_the_common_direction_unless_their_component_is_removed(threshold, kept):
    """A value is stored beside it. The projections of 501 keys, at angles of +-a to it in turn, take cos(2a) each."""
    a, count = math.asin(1e-3**0.5), 501
    sides = torch.tensor([1.0, -1.0]).repeat(251)[:count]
    distractors = torch.stack([torch.full((count,), math.cos(a)), math.sin(a) * sides], -1)
    k = 1e3 * torch.cat([torch.tensor([[0.0, 1.0]]), distractors])[None, None]
    x, dt = torch.zeros(1, 1, count + 1, 1), torch.full((1, 1, count + 1, 1), 30.0)
    x[:, :, 0] = 1
    q, bias = torch.zeros_like(k) + torch.tensor([0.0, 1e3]), torch.zeros(1, 1)
    commons = {bias.data_ptr(): torch.tensor([1.0, 0.0])}
    with changed_keys(without_small(commons, threshold)):
        y = mixers.scan(x, dt, k, q, dt_bias=bias, rule="longhorn_exact")
    assert y.flatten()[[0, -1]].tolist() == pytest.approx([1, kept], rel=2e-3)


@pytest.mark.parametrize("threshold, kept", [(0, (1 - 2e-3) ** 500), (0.01, 1)])
def test_the_keys_of_gated_delta_are_changed_head_by_head(threshold, kept):
    """As above, in the first of four heads. The common direction of the others is another one, so they keep theirs."""
    mixer = mixers.GatedDelta(72, 2).double()
    a, count = math.asin(1e-3**0.5), 501
    sides = torch.tensor([1.0, -1.0]).repeat(251)[:count]
    k = torch.zeros(2, 1, 4, count + 1, 16, dtype=torch.double)
    k[..., 0, 1], k[..., 1:, 0], k[..., 1:, 1] = 1, math.cos(a), math.sin(a) * sides
    v, q = torch.zeros(2, 1, 4, count + 1, 36, dtype=torch.double), torch.zeros_like(k)
    v[..., 0, :], q[..., 1] = 1, 1
    commons = torch.zeros(2, 1, 4, 1, 16, dtype=torch.double)
    commons[:, :, 0, :, 0], commons[:, :, 1:, :, 2] = 1, 1
    gates = torch.full((2, 1, 4, count + 1), -40.0).double(), torch.full((2, 1, 4, count + 1), 40.0).double()
    mixer.norm = torch.nn.Identity()
    with changed_keys(without_small({mixer.step_bias.data_ptr(): commons}, threshold)):
        y, _ = mixer.mix(q, k, v, *gates, state=None)
    expected = [kept, *3 * [(1 - 2e-3) ** 500]]
    assert y[0, 0, :, -1, 0].tolist() == pytest.approx(expected, rel=2e-3)
