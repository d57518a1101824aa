"""The mixer in every form against its equations, one token at a time, and its initialisation against the papers."""

import math
import sys

import composition
import oracle
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from oracle import KERNEL_RULES
from torch.testing._internal.two_tensor import TwoTensor

from vilonghorn.layers import Block, Mixer
from vilonghorn.layers.exportable import make_exportable
from vilonghorn.ops.backends import cpu

FORMS = {
    **{rule: dict(rule=rule) for rule in KERNEL_RULES},
    "shared": dict(shared_directions=True),
    "shared, exact": dict(rule="longhorn_exact", shared_directions=True),
    "shared, mamba": dict(rule="mamba", shared_directions=True),
    "scalar beta": dict(num_heads=1),
    "heads": dict(rule="longhorn_exact", num_heads=2),
    "scalar beta, shared": dict(num_heads=1, shared_directions=True),
    "no rule": dict(rule=None),
}
WITH_RULE = [form for form in FORMS if form != "no rule"]


def make_mixer(dim=24, **kwargs):
    torch.manual_seed(0)
    mixer = Mixer(dim, dtype=torch.float64, **kwargs)
    mixer.load_state_dict(composition.perturb(mixer.state_dict()))
    return mixer


def written_out(mixer, tokens):
    """The mixer's output from its parameters, by the oracle's equations."""
    weights, options = dict(mixer.named_parameters()), dict(rule=mixer.rule, reverse=mixer.reverse)
    if "scan_norm" in weights:
        return composition.shared_mixer(weights, tokens, **options)
    in_proj, out_proj = (weights.pop(f"{name}.weight") for name in ("in_proj", "out_proj"))
    if "A_log" in weights:
        weights["A"] = -weights.pop("A_log").exp()
    return oracle.mixer(tokens @ in_proj.T, **weights, **options) @ out_proj.T


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
    dt_rank=st.sampled_from([None, 1, 5]),
)
def test_forms_equal_the_equations_at_every_shape(form, reverse, length, **sizes):
    mixer = make_mixer(dim=6, reverse=reverse, expand=3, **sizes, **FORMS[form])
    tokens = torch.randn(2, length, 6, dtype=torch.float64)
    torch.testing.assert_close(mixer(tokens), written_out(mixer, tokens), rtol=1e-8, atol=1e-10)


def results(mixer, tokens):
    """The mixer's result under autocast, and the gradients of its parameters."""
    with torch.autocast("cpu", torch.bfloat16):
        y = mixer(tokens)
    return [y, *torch.autograd.grad(y.float().square().sum(), list(mixer.parameters()))]


@pytest.mark.parametrize("form", WITH_RULE)
def test_weights_that_autocast_converts_at_once_give_the_same_bits(form, monkeypatch):
    monkeypatch.setattr(cpu, "unavailable", lambda *_: "as on a GPU")
    mixer, tokens = make_mixer(**FORMS[form]).float(), torch.randn(2, 13, 24)
    monkeypatch.setattr(sys.modules["vilonghorn.ops.backends"], "_warned", {("cpu", torch.bfloat16, mixer.rule)})
    casts = []
    monkeypatch.setattr(torch, "cat", lambda *args, cat=torch.cat: casts.append(args) or cat(*args))
    at_once = results(mixer, tokens)
    assert sum(len(tensors) == 4 for tensors, *_ in casts) == 1
    casts.clear()
    mixer.in_proj.register_forward_hook(lambda *_: None)  # a hook sees the call of its layer
    one_by_one = results(mixer, tokens)
    assert not any(len(tensors) == 4 for tensors, *_ in casts)
    assert all(torch.equal(a, b) for a, b in zip(at_once, one_by_one, strict=True))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("part", ["in_proj.weight", "out_proj.weight"])
@torch.no_grad()
def test_weights_of_another_tensor_class_are_left_to_torch(part, autocast, monkeypatch):
    """As those of torchao and DTensor, whose numbers are not in one float32 memory."""
    if autocast:
        monkeypatch.setattr(cpu, "unavailable", lambda *_: "as on a GPU")
        warned = {("cpu", torch.bfloat16, "longhorn"), ("cpu", torch.float32, "longhorn")}
        monkeypatch.setattr(sys.modules["vilonghorn.ops.backends"], "_warned", warned)
    block, tokens = Block(24), torch.randn(2, 13, 24)
    name, weight = f"mixer.{part}", block.mixer.get_parameter(part)
    others = [weight.clone(), torch.randn_like(weight)]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = [torch.func.functional_call(block, {name: w}, (tokens,)) for w in others]
        y = torch.func.functional_call(block, {name: TwoTensor(*others)}, (tokens,))
    for actual, plain in zip((y.a, y.b), expected):
        torch.testing.assert_close(actual, plain, rtol=1e-4, atol=1e-2 if autocast else 1e-5)


def test_unknown_and_contradictory_forms_are_refused():
    with pytest.raises(ValueError, match="'mambo'.*'longhorn', 'longhorn_exact', 'mamba'"):
        Mixer(32, rule="mambo")
    with pytest.raises(ValueError, match="reverse is empty"):
        Mixer(32, reverse=())
    with pytest.raises(ValueError, match="shared_directions is True, expected False: without a rule"):
        Mixer(32, rule=None, shared_directions=True)
    for rule in ("mamba", None):
        with pytest.raises(ValueError, match=f"num_heads is 1, expected None: rule {rule!r} has no heads"):
            Mixer(32, rule=rule, num_heads=1)
    for heads in (5, -1, 2.0, "4"):
        with pytest.raises(ValueError, match=f"heads is {heads!r}, expected a divisor of the inner width 64"):
            Mixer(32, num_heads=heads)
    assert [Mixer(64, num_heads=heads).dt_rank for heads in (None, 2, 128)] == [4, 2, 4]
    assert Mixer(64, num_heads=2, dt_rank=3).dt_rank == 3


def test_a_convolution_over_the_grid_needs_a_grid_that_fits():
    mixer, tokens = Mixer(8, d_conv=(3, 3)), torch.randn(1, 7, 8)
    assert mixer(tokens, [2, 3]).shape == tokens.shape
    with pytest.raises(ValueError, match=r"grid is None; give grid=\(rows, columns\)"):
        mixer(tokens)
    with pytest.raises(ValueError, match="7 tokens, expected 8, the patches of a 2 x 4 grid, or 9 with a class token"):
        mixer(tokens, [2, 4])


@pytest.mark.parametrize("form", ["longhorn", "shared", "heads", "no rule"])
def test_a_convolution_over_the_grid_runs_in_short_types_and_as_torchs_operators(form):
    mixer = make_mixer(d_conv=(3, 3), **FORMS[form]).float()
    tokens = torch.randn(2, 16, 24)
    expected = mixer(tokens, [3, 5])
    with torch.autocast("cpu", torch.bfloat16):
        y = mixer(tokens, [3, 5])
    assert y.dtype == torch.bfloat16 and (y.float() - expected).abs().max() < 0.05 * expected.abs().max()
    torch.testing.assert_close(make_exportable(mixer)(tokens, [3, 5]), expected, rtol=1e-4, atol=1e-5)


def test_longhorn_starts_with_open_gates_and_mamba_with_its_own_decays_and_log_uniform_steps():
    mixer = Mixer(64, rule="longhorn")
    assert mixer.A_log is None and not mixer.dt_bias.any() and (mixer.D == 1).all()
    mixer = Mixer(256, rule="mamba")
    assert torch.allclose(mixer.A_log.exp(), torch.arange(1.0, 17).expand(2, 512, 16))
    step = F.softplus(mixer.dt_bias.detach())
    assert 0.99e-3 < step.min() < 1.3e-3 and 0.08 < step.max() < 1.01e-1
    share = (step < 1e-2).float().mean()  # the geometric middle of the range
    assert abs(share - 0.5) < 0.08


@pytest.mark.parametrize("rule", KERNEL_RULES)
def test_linear_weights_start_uniform_at_the_scale_of_their_inputs(rule):
    mixer = Mixer(64, rule=rule, num_branches=9)
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


@pytest.mark.parametrize(
    "options", [dict(rule="mamba"), dict(num_heads=4), dict(shared_directions=True), dict(rule=None)]
)
def test_pieces_of_any_length_give_what_the_whole_sequence_gives(options):
    block = Block(8, reverse=(False,), mlp_ratio=2, **options).double()
    x = torch.randn(2, 11, 8, dtype=torch.float64, requires_grad=True)
    expected, state, parts = block(x), None, []
    for piece in x.split([1, 1, 2, 4, 3], 1):
        y, state = block.step(piece, state)
        parts.append(y)
    actual = torch.cat(parts, 1)
    torch.testing.assert_close(actual, expected)
    weights = torch.randn_like(expected)
    grads = [torch.autograd.grad((y * weights).sum(), x)[0] for y in (actual, expected)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize(
    "options", [dict(reverse=(True,)), dict(reverse=(False, True)), dict(d_conv=(3, 3), reverse=(False,))]
)
def test_a_mixer_that_needs_later_tokens_has_no_step(options):
    with pytest.raises(ValueError, match="step needs a mixer with reverse"):
        Mixer(8, **options).step(torch.zeros(1, 2, 8))
