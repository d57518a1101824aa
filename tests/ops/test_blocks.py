"""Several blocks as one operator, against the float64 oracle."""

import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import block_inputs, error, mlp_inputs, residual_block
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from vilonghorn.ops import block, gated_mlp
from vilonghorn.ops.backends import cpu as native
from vilonghorn.ops.blocks import BlockForm, blocks
from vilonghorn.ops.validate import RULES, BlockArguments

pytestmark = pytest.mark.skipif(native.unavailable("cpu") is not None, reason="needs the native CPU library")
NAMES = BlockArguments._fields[1:11]


def make_form(directions, channels, states, rank, width, dim, rule, hidden=0, seed=0, kernel=None) -> BlockForm:
    """A block with random weights, and with an MLP if `hidden` is not 0."""
    sizes = (directions, 1, 1, channels, states, rank, width if kernel is None else kernel[0] * kernel[1], dim)
    values = block_inputs(*sizes, rule=rule, seed=seed)
    if kernel is not None:
        values["conv_weight"] = values["conv_weight"].unflatten(2, kernel)
    mlp = mlp_inputs(1, dim, hidden=hidden, seed=seed) if hidden else {}
    mlp_weights = tuple(mlp.get(name) for name in ("norm_weight", "in_proj", "out_proj"))
    reverse = [(seed + i) % 2 == 1 for i in range(directions)]
    return BlockForm(tuple(values.get(name) for name in NAMES), mlp_weights, rule, reverse, 1e-3, 0.1)


def in_turn(x, forms, one_block, one_mlp, grid=None):
    for form in forms:
        weights = {name: w for name, w in zip(NAMES, form.weights) if w is not None or name == "A"}
        x = one_block(x=x, **weights, rule=form.rule, reverse=form.reverse, eps=form.eps, grid=grid)
        if form.mlp_weights[0] is not None:
            x = one_mlp(x, *form.mlp_weights, eps=form.mlp_eps)
    return x


def hold(x, forms, grid=None):
    expected = in_turn(x.double(), forms, residual_block, oracle.gated_mlp, grid)
    given = x.clone()
    assert error(blocks(x, forms, grid=grid), expected) < 3e-6
    assert torch.equal(x, given)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_they_agree_with_the_oracle_on_any_number_of_threads(count, rule, threads):
    forms = [make_form(2, 40, 16, 3, 4, 24, rule, hidden=9 * (i % 2), seed=i) for i in range(count)]
    hold(torch.randn(2, 65, 24, generator=torch.Generator().manual_seed(0)), forms)


def test_blocks_may_differ_in_all_but_the_width_of_the_tokens():
    forms = [
        make_form(1, 6, 4, 2, 9, 10, "longhorn_exact", hidden=33, kernel=(3, 3)),
        make_form(3, 17, 2, 1, 2, 10, "mamba", seed=1),
        make_form(2, 33, 16, 5, 4, 10, "longhorn", hidden=1, seed=2),
    ]
    hold(torch.randn(2, 13, 10, generator=torch.Generator().manual_seed(0)).mT.contiguous().mT, forms, grid=(3, 4))


@settings(max_examples=25, deadline=None)
@given(
    batch=st.integers(1, 3),
    length=st.integers(1, 70),
    sizes=st.tuples(*[st.integers(1, most) for most in (2, 36, 8, 4, 4, 30)]),
    hiddens=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    seed=st.integers(0, 2**31),
)
def test_they_are_the_operators_of_each_block_at_any_size(batch, length, sizes, hiddens, seed):
    x = torch.randn(batch, length, sizes[-1], generator=torch.Generator().manual_seed(seed))
    forms = [make_form(*sizes, "longhorn_exact", hidden=hidden, seed=seed + i) for i, hidden in enumerate(hiddens)]
    assert torch.equal(blocks(x, forms), in_turn(x, forms, block, gated_mlp))


def test_they_count_the_operations_of_each_block():
    x, forms = torch.randn(2, 65, 24), [make_form(2, 40, 16, 3, 4, 24, "longhorn", hidden=9 * i) for i in range(3)]
    counts = []
    for run in (lambda: blocks(x, forms), lambda: in_turn(x, forms, block, gated_mlp)):
        with FlopCounterMode(display=False) as counter:
            run()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_the_operator_passes_torchs_checks():
    form = make_form(2, 40, 16, 3, 4, 24, "longhorn", hidden=9)
    weights, options = [*form.weights, *form.mlp_weights], (["longhorn"], [0, 1], [1e-3, 0.1], False, [])
    torch.library.opcheck(torch.ops.vilonghorn.blocks.default, (torch.randn(2, 5, 24), weights, *options))


def test_what_does_not_fit_is_refused():
    form, x = make_form(1, 5, 3, 2, 4, 7, "longhorn", hidden=6), torch.randn(2, 9, 7)
    with pytest.raises(ValueError, match=r"block: x has shape \(9, 7\), expected \(B, L, dim\)"):
        blocks(x[0], [form])
    with pytest.raises(ValueError, match=r"gated_mlp: in_proj has shape \(12, 8\), expected \(12, 7\)"):
        mlp = form.mlp_weights
        blocks(x, [form, form._replace(mlp_weights=(mlp[0], torch.ones(12, 8), mlp[2]))])
    with pytest.raises(TypeError, match="x is torch.float64, expected torch.float32"):
        blocks(x.double(), [form])
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="has no forward-mode derivative"):
        blocks(forward_ad.make_dual(x, x), [form])


def test_a_list_that_is_not_complete_is_refused_and_so_is_a_gradient():
    form, x = make_form(1, 5, 3, 2, 4, 7, "longhorn", hidden=6), torch.randn(2, 9, 7)
    norm = form.mlp_weights[0]
    for wrong in (dict(reverse=()), dict(reverse=(True, False)), dict(weights=form.weights[1:])):
        with pytest.raises(ValueError, match="blocks: block 1 has .* expected 10, 3 and "):
            blocks(x, [form, form._replace(**wrong)])
    with pytest.raises(ValueError, match="without an MLP its weights are None"):
        blocks(x, [form._replace(mlp_weights=(norm, None, None))])
    with pytest.raises(ValueError, match="0 weights and 0 epsilons for 0 blocks, expected at least one block"):
        blocks(x, [])
    with pytest.raises(RuntimeError, match=r"has no gradient; use torch.no_grad\(\)"):
        blocks(x.requires_grad_(), [form])


def test_a_negated_view_is_read_as_its_values():
    form, x = make_form(1, 5, 3, 2, 4, 7, "longhorn"), torch.randn(2, 9, 7)
    norm, in_proj, *others = form.weights
    negated = form._replace(weights=(norm, torch._neg_view(-in_proj), *others))
    assert torch.equal(blocks(x, [negated]), blocks(x, [form]))


def test_tokens_that_are_not_contiguous_are_copied_once():
    forms = [make_form(1, 8, 3, 2, 4, 16, "longhorn", hidden=2, seed=i) for i in range(8)]
    x = torch.randn(4, 300, 16)
    with torch.profiler.profile(profile_memory=True) as profile:
        blocks(x.mT.contiguous().mT, forms)
    allocated = sum(event.self_cpu_memory_usage for event in profile.events() if event.self_cpu_memory_usage > 0)
    assert allocated < 8 * x.nbytes  # the tokens twice, two streams, xz, projections
