"""The block and the mixer of the CPU library, called without their operators, against float64."""

from functools import partial
from unittest import mock

import native_block
import pytest
import torch
from native_block import RULES, block_truth, mamba_inner_truth
from oracle import compare, error, mixer_inputs, value_and_grads

from vilonghorn.ops.backends import cpu
from vilonghorn.ops.validate import BlockArguments, MambaInnerArguments, ScanArguments

pytestmark = pytest.mark.skipif(cpu.unavailable("cpu") is not None, reason="needs the native CPU library")
rules = pytest.mark.parametrize("rule", RULES)
# (G, B, L, D, N, R, K, dim), heads, hidden, grid and filter. Vectors have 4, 8 or 16 channels.
CASES = [
    ((1, 1, 1, 3, 2, 1, 1, 4), 1, 5, ()),
    ((2, 2, 2, 5, 3, 2, 4, 3), 5, 0, ()),
    ((2, 3, 33, 30, 16, 3, 4, 17), 5, 37, ()),
    ((3, 2, 65, 96, 16, 12, 4, 24), 2, 0, ()),
    ((2, 2, 70, 80, 16, 3, 2, 10), 1, 300, ()),
    ((1, 3, 41, 36, 5, 5, 9, 16), 4, 70, (5, 8, 3, 3)),
    ((2, 1, 130, 40, 16, 2, 5, 8), 2, 0, (10, 13, 1, 5)),
]


def drop_scales(hidden: int, batch: int) -> torch.Tensor:
    """Zeros, and factors that differ."""
    scales = 1 + torch.arange((1 + (hidden > 0)) * batch).float().view(-1, batch)
    return scales * (torch.arange(batch) % 2 == 0)


@rules
@pytest.mark.parametrize("drops", [False, True], ids=["kept", "dropped"])
@pytest.mark.parametrize("shape, heads, hidden, conv_grid", CASES, ids=str)
def test_it_agrees_with_float64_on_any_number_of_threads(shape, heads, hidden, conv_grid, drops, rule, threads):
    values, options = native_block.inputs(shape, heads, hidden, rule, conv_grid)
    options |= dict(drop_scales=drop_scales(hidden, shape[1])) if drops else {}
    compare(native_block.block, values, 6e-6, truth=block_truth, **options)


@rules
@pytest.mark.parametrize("isa", cpu.isas())
def test_every_instruction_set_agrees_with_float64(isa, rule):
    with mock.patch.object(cpu, "_isa", cpu.isas()[isa]):
        for shape, heads, hidden, conv_grid in (CASES[2], CASES[5]):
            values, options = native_block.inputs(shape, heads, hidden, rule, conv_grid)
            compare(native_block.block, values, 6e-6, truth=block_truth, **options)


@rules
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("conv_grid", [(), (9, 5, 3, 3)], ids=str)
def test_a_mixer_agrees_with_float64_in_every_dtype(conv_grid, dtype, tolerance, rule, threads):
    weights = torch.float64 if dtype == torch.float64 else torch.float32
    values = mixer_inputs(3, 2, 45, 42, 16, 3, 9 if conv_grid else 4, rule=rule, dtype=weights)
    values |= {name: values[name][:, :7].contiguous() for name in ("dt_proj", "dt_bias")}
    values = {name: v for name, v in values.items() if rule != "none" or name not in native_block.RECURRENT}
    values["xz"] = values["xz"].to(dtype)
    options = dict(rule=rule, reverse=[False, True, True], conv_grid=list(conv_grid))
    compare(native_block.mamba_inner, values, tolerance, truth=mamba_inner_truth, **options)


@rules
def test_heads_give_the_bits_of_repeated_weights(rule):
    values, options = native_block.inputs(CASES[2][0], 5, 37, rule)
    repeated = {n: v.repeat_interleave(6, 1) if n in ("dt_proj", "dt_bias") else v for n, v in values.items()}
    first, second = (value_and_grads(native_block.block, v, **options) for v in (values, repeated))
    assert torch.equal(first["y"], second["y"])
    for name in values:
        grad = second[name].unflatten(1, (5, 6)).sum(2) if name in ("dt_proj", "dt_bias") else second[name]
        assert error(first[name], grad) < 1e-6


@pytest.mark.parametrize("hidden", [0, 37])
def test_a_sample_whose_branches_are_dropped_keeps_its_tokens(hidden):
    values, options = native_block.inputs(CASES[2][0], 5, hidden, "longhorn")
    y = native_block.block(**values, **options, drop_scales=drop_scales(hidden, 3))
    assert torch.equal(y[1], values["x"][1]) and not torch.equal(y[0], values["x"][0])


def test_gradients_that_are_not_wanted_are_left_out():
    values, options = native_block.inputs(CASES[2][0], 5, 37, "longhorn")
    args = BlockArguments(*(values.get(name) for name in BlockArguments._fields[:15]), **options)
    y, *saved = cpu.block_forward(args, True)
    for wanted in (0, 1):
        grads = dict(zip(args._fields, cpu.block_backward(y, saved, args, [wanted] * 15)))
        assert grads["A"] is grads["drop_scales"] is None and grads["x"].shape == y.shape
        assert all(grads[n].numel() == wanted * values[n].numel() for n in ("in_proj", "mlp_in_proj", "mlp_out_proj"))


@pytest.mark.parametrize("batch", [1, 2])
def test_blocks_in_one_call_give_the_bits_of_each_block(batch, threads):
    x, blocks = None, []
    for seed, (hidden, rule) in enumerate([(0, "longhorn"), (5, "none"), (9, "mamba"), (0, "none"), (7, "longhorn")]):
        values, options = native_block.inputs((2, batch, 33, 20, 4, 3, 4, 17), 5, hidden, rule, seed=seed)
        x = values["x"] if x is None else x
        tensors = [values.get(name) for name in BlockArguments._fields[1:15]]
        blocks.append(BlockArguments(x, *tensors, **options))
    given, expected = x.clone(), x
    for args in blocks:
        expected = cpu.block_forward(args._replace(x=expected), False)[0]
    assert torch.equal(cpu.blocks_forward(blocks), expected) and torch.equal(x, given)


@pytest.mark.parametrize("hidden", [0, 37])
def test_a_profile_names_the_stages_and_changes_nothing(hidden):
    values, options = native_block.inputs(CASES[2][0], 5, hidden, "longhorn")
    run = partial(value_and_grads, native_block.block, values, **options)
    expected = run()
    with torch.profiler.profile() as profile:
        actual = run()
    names = {event.key.removeprefix("vilonghorn::block/") for event in profile.key_averages()}
    stages = {*cpu.FORWARD_STAGES, *cpu.BACKWARD_STAGES}
    assert names & stages == (stages if hidden else stages - {*cpu.MLP_STAGES})
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_a_rule_that_the_library_lacks_is_an_error():
    x, k, weight = torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 2), torch.zeros(1, 4)
    scan = ScanArguments(x, x, k, k, rule="none")
    xz, conv, x_proj, dt_proj = torch.zeros(1, 3, 8), torch.zeros(1, 4, 2), torch.zeros(1, 5, 4), torch.zeros(1, 4, 1)
    inner = MambaInnerArguments(xz, conv, weight, x_proj, dt_proj, weight, None, weight, "gru", [0])
    values, options = native_block.inputs((1, 1, 3, 4, 2, 1, 2, 5), 4, 6, "longhorn")
    options["rule"] = "gru"
    block = BlockArguments(*(values.get(name) for name in BlockArguments._fields[:15]), **options)
    saved = [torch.zeros(1000)] * 5
    calls = [partial(cpu.forward, scan, True), partial(cpu.mamba_inner_forward, inner, True)]
    calls += [partial(cpu.block_forward, block, save) for save in (False, True)]
    calls += [partial(cpu.backward, x, scan, saved[0]), partial(cpu.mamba_inner_backward, x[0], inner, *saved[:2])]
    calls += [partial(cpu.block_backward, values["x"], saved, block, [1] * 15)]
    for call in calls:
        with pytest.raises(RuntimeError, match="the CPU library has no kernel for this rule; use backend='reference'"):
            call()
