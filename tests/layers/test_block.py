"""The residual block: its sums, their type, and stochastic depth."""

import copy
import gc
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import attrgetter

import pytest
import timm
import torch
from count_calls import count
from hypothesis import given
from hypothesis import strategies as st
from marks import needs_amx, needs_compiler, needs_fused
from native_gemm import products
from oracle import KERNEL_RULES
from torch import nn
from torch._dynamo.utils import counters
from torch.autograd import forward_ad

from vilonghorn.layers import Block, Blocks, to_fp32
from vilonghorn.layers.exportable import make_exportable
from vilonghorn.ops.backends import cpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_residual_stays_in_float32_or_wider_whatever_the_parameters(dtype):
    block = Block(32, dtype=dtype)
    stream = to_fp32(torch.randn(2, 7, 32).to(dtype))
    assert stream.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert block(stream).dtype == stream.dtype


def test_drop_path_skips_the_branch_of_whole_samples_and_rescales_the_rest():
    block = Block(32, drop_path=0.5)
    tokens = torch.randn(64, 3, 32)
    branch = block.eval()(tokens) - tokens
    scale = (block.train()(tokens) - tokens) / branch
    kept = scale[:, 0, 0] > 1
    assert 16 < kept.sum() < 48
    assert torch.allclose(scale[kept], torch.tensor(2.0), atol=1e-2)
    assert torch.equal(scale[~kept], torch.zeros_like(scale[~kept]))


def test_a_block_is_its_parts_bit_for_bit():
    block, x = Block(24), torch.randn(2, 7, 24)
    leaves = [x.requires_grad_(), *block.parameters()]
    results = [[y, *torch.autograd.grad(y.square().sum(), leaves)] for y in (block(x), x + block.mixer(block.norm(x)))]
    assert all(map(torch.equal, *results))


PARTS = ["norm", "mixer", "mixer.in_proj", "mixer.out_proj", "drop_path"]
MLP_PARTS = ["norm2", "mlp", "mlp.fc1", "mlp.act", "mlp.fc2"]


class Wrapped(nn.Module):
    """As libraries of adapters and quantization wrap a module: none of its attributes is there."""

    def __init__(self, module, change=lambda value: value):
        super().__init__()
        self.module, self.change = module, change

    def forward(self, *args):
        return self.change(self.module(*args))


@pytest.mark.parametrize("way", ["hook", "pre-hook", "forward", "wrapped"])
@pytest.mark.parametrize("part", PARTS + MLP_PARTS)
def test_a_part_with_a_hook_or_another_forward_or_in_its_place_is_called(part, way):
    """Tools that move weights about as they are needed replace `forward` of a module, rather than add hooks."""
    block, x = Block(24, mlp_ratio=1.0 if part in MLP_PARTS else 0.0), torch.randn(2, 7, 24)
    module, before, seen = block.get_submodule(part), block(x), []
    (parent, _, name), forward = part.rpartition("."), module.forward

    def double(value, *_):
        seen.append(value)
        return 2 * value

    if way == "hook":
        remove = module.register_forward_hook(lambda module, inputs, output: double(output)).remove
    elif way == "pre-hook":
        remove = module.register_forward_pre_hook(lambda module, inputs: (double(*inputs),)).remove
    elif way == "forward":
        module.forward = lambda *inputs: double(forward(*inputs))
        remove = partial(delattr, module, "forward")
    else:
        setattr(block.get_submodule(parent), name, Wrapped(module, double))
        remove = partial(setattr, block.get_submodule(parent), name, module)
    after = block(x)
    assert len(seen) == 1 and (way == "pre-hook" and "norm" in part or not torch.equal(after, before))
    assert torch.equal(Blocks(block)(x), after)
    remove()
    torch.testing.assert_close(block(x), before, **{} if way == "wrapped" else dict(rtol=0, atol=0))


def operators(function) -> set[str]:
    """Names of the operators that run."""
    with torch.profiler.profile() as profile:
        function()
    return {event.key for event in profile.key_averages()}


OPTIONS = {
    "one direction": dict(reverse=[True]),
    "heads": dict(reverse=(False,), num_heads=3, mlp_ratio=2.0),
    "MLP on a grid": dict(mlp_ratio=2.0, d_conv=(3, 3)),
    "no rule": dict(rule=None, reverse=(False,), d_conv=(3, 3), mlp_ratio=1.0),
}


@needs_fused
@pytest.mark.parametrize("drop_path, training", [(0.0, True), (0.5, False), (0.5, True)])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_block_is_one_operator_whatever_it_is_made_of(options, drop_path, training):
    block = Block(24, drop_path=drop_path, **OPTIONS[options]).train(training)
    names = operators(lambda: block(torch.randn(2, 7, 24), [2, 3]))
    assert "vilonghorn::block" in names
    assert not names & {"aten::add", "aten::linear", "aten::convolution", "vilonghorn::rms_norm_cpu"}


@needs_fused
def test_dropped_branches_are_those_that_timm_drops():
    block, x = Block(24, drop_path=0.5, mlp_ratio=1.0).train(), torch.randn(16, 7, 24)
    torch.manual_seed(3)
    fused = block(x)
    block.mixer.register_forward_hook(lambda *_: None)  # composes the block
    torch.manual_seed(3)
    torch.testing.assert_close(fused, block(x))


@needs_fused
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda block: pickle.loads(pickle.dumps(block))])
def test_a_copy_runs_with_its_own_weights_and_hooks(copied):
    block, x = Block(24), torch.randn(2, 7, 24)
    other = copied(block)
    assert "vilonghorn::block" in operators(lambda: other(x))
    other.mixer.out_proj.weight.data.zero_()
    assert torch.equal(other(x), x) and not torch.equal(block(x), x)
    other.mixer.register_forward_hook(lambda *_: torch.ones_like(x))
    assert torch.equal(other(x), x + 1) and not torch.equal(block(x), x + 1)


def change_scan_norm(block):
    block.mixer.scan_norm = nn.Parameter(torch.full((1, 48), 0.5))


def change_gate(block):
    block.mlp.gate_last = True


def change_weight(block):
    weight = block.mixer.in_proj.weight.detach()
    del block.mixer.in_proj.weight
    block.mixer.in_proj.weight = 2 * weight


@pytest.mark.parametrize("change", [change_scan_norm, change_gate, change_weight])
def test_what_changed_after_construction_counts_with_and_without_gradients(change):
    block, x = Block(24, mlp_ratio=1.0, reverse=(False,)), torch.randn(2, 7, 24)
    before = block(x)
    change(block)
    normed = block.mixer(block.norm(x))
    expected = x + normed
    expected = expected + block.mlp(block.norm2(expected))
    torch.testing.assert_close(block(x), expected)
    with torch.no_grad():
        torch.testing.assert_close(Blocks(block)(x), expected)
    assert not torch.allclose(before, expected)


class Doubled(Block):
    def forward(self, x, grid=None):
        return 2 * super().forward(x, grid)


def test_a_subclass_with_a_forward_of_its_own_is_called():
    blocks, x = Blocks(Doubled(24), Block(24)), torch.randn(2, 7, 24)
    with torch.no_grad():
        assert torch.equal(blocks(x), blocks[1](2 * Block.forward(blocks[0], x)))


@needs_fused
def test_tensors_without_numbers_of_their_own_take_the_operators_way():
    blocks, x = Blocks(Block(24), Block(24)), torch.randn(2, 7, 24)
    with torch.no_grad():
        zeros = torch._efficientzerotensor((2, 7, 24))
        assert torch.equal(blocks(zeros), blocks(torch.zeros(2, 7, 24)))
        assert torch.equal(blocks(torch._neg_view(-x)), blocks(x))
        fake = torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True).from_tensor(x)
        with fake.fake_mode:
            assert blocks(fake).shape == x.shape
    with forward_ad.dual_level(), torch.no_grad(), pytest.raises(RuntimeError, match="no forward-mode derivative"):
        blocks(forward_ad.make_dual(x, x))


@needs_fused
def test_a_grid_of_tensors_is_checked_each_time():
    block, side = Block(24, d_conv=(3, 3)), torch.tensor(3)
    block(torch.randn(1, 9, 24), [side, side])
    side.fill_(400)
    with pytest.raises(ValueError, match="9 tokens, expected 160000"):
        block(torch.randn(1, 9, 24), [side, side])


@pytest.mark.parametrize("part", ["mixer", "mlp"])
def test_a_replaced_part_is_neither_kept_nor_saved(part):
    block, x = Block(24, mlp_ratio=1.0), torch.randn(2, 7, 24)
    old = weakref.ref(block.get_submodule(part))
    setattr(block, part, nn.Identity())
    assert len(pickle.dumps(block)) < len(pickle.dumps(Block(24, mlp_ratio=1.0)))
    expected = block(x)
    gc.collect()
    assert old() is None and torch.equal(copy.deepcopy(block)(x), expected)


@needs_fused
def test_a_weight_of_another_shape_in_backward_is_an_error():
    block, x = Block(24), torch.randn(2, 7, 24)
    y = block(x)
    block.mixer.out_proj.weight.data = torch.zeros(30, 60)
    with pytest.raises((ValueError, RuntimeError), match="shape"):
        y.sum().backward()


def plan_of(block):
    return block.__dict__.get("plan")


# The number of three blocks that run by their plans where something has changed.
PLANNED = dict(nothing=3, training=3, gradients=0, hook=2, block_hook=3, dropped=0, norm=2, wrapped=2, compiled=2)
PLANNED |= dict(vmap=0, vmap_of_weights=0)


@needs_fused
@pytest.mark.parametrize("change", PLANNED)
def test_without_gradients_blocks_that_are_as_they_were_made_run_by_their_plans(change, monkeypatch):
    drop_path = 0.0 if change == "training" else 0.5
    blocks = Blocks(*(Block(24, mlp_ratio=1.0 * i, d_conv=(3, 3), drop_path=drop_path) for i in range(3)))
    blocks.train(change in ("training", "dropped"))
    x = torch.randn(2, 7, 24)
    if change == "hook":
        blocks[2].mlp.fc1.register_forward_hook(lambda module, inputs, output: output)
    if change == "block_hook":
        blocks[0].register_forward_pre_hook(lambda module, inputs: None)
    if change == "norm":
        blocks[1].norm2 = nn.RMSNorm(24, eps=1e-5)
    if change == "wrapped":
        blocks[2].mixer = Wrapped(blocks[2].mixer)
    if change == "compiled":
        blocks[1].compile(backend="eager")
    name = "1.mixer.in_proj.weight"
    weight = blocks.get_parameter(name).detach()

    def run():
        with torch.set_grad_enabled(change == "gradients"):
            if change == "vmap":
                return torch.vmap(lambda t: blocks(t[None], [2, 3])[0])(x)
            if change == "vmap_of_weights":
                call = torch.func.functional_call
                return torch.vmap(lambda w: call(blocks, {name: w}, (x, [2, 3])))(weight[None])[0]
            return blocks(x, [2, 3])

    calls, infer = [], cpu.infer_block
    monkeypatch.setattr(cpu, "infer_block", lambda *arguments: calls.append(arguments) or infer(*arguments))
    run()
    assert len(calls) == PLANNED[change]
    if change != "dropped":
        expected = x
        for block in blocks:  # with gradients: by the operator
            expected = block(expected, [2, 3])
        torch.testing.assert_close(run(), expected)


@needs_fused
@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 70), st.integers(1, 30)),
    rule=st.sampled_from([*KERNEL_RULES, None]),
    heads=st.booleans(),
    mlp_ratio=st.sampled_from([0.0, 0.5, 2.0]),
    inference=st.booleans(),
)
def test_a_plan_gives_the_bits_of_the_operator(sizes, rule, heads, mlp_ratio, inference):
    batch, length, dim = sizes
    num_heads = 2 if heads and rule in ("longhorn", "longhorn_exact") else None
    block = Block(dim, rule=rule, mlp_ratio=mlp_ratio, num_heads=num_heads)
    x = torch.randn(batch, dim, length).mT  # not contiguous
    expected, before = block(x), x.clone()
    with torch.inference_mode() if inference else torch.no_grad():
        results = [block(x), block(x)]  # a new plan, a plan that is kept
    assert plan_of(block) is not None and torch.equal(x, before)
    assert all(torch.equal(result, expected) for result in results)


def mirrored(t):
    """The same numbers, the columns of a matrix one after the other in memory."""
    return t.mT.contiguous().mT


CHANGES = [  # where, and the new value from the old one
    ("mixer.in_proj.weight.data", lambda data: data.mul_(2)),  # in place, without a new version of the parameter
    ("mixer.in_proj.weight.data", mirrored),
    ("mlp.fc1.weight.data", lambda data: 2 * data),
    ("mixer.A_log.data", lambda data: data.add_(0.5)),
    ("mixer.A_log.data", lambda data: mirrored(data) + 0.5),
    ("mixer.A_log", lambda rates: nn.Parameter(rates.double() + 0.5)),
    ("mixer.D", lambda D: nn.Parameter(torch.full_like(D, 3.0))),
    ("mixer.out_proj.bias", lambda bias: nn.Parameter(torch.ones(24))),
    ("mixer.flags", lambda flags: flags.reverse() or flags),  # in place
    ("norm.weight.data", torch._neg_view),
    ("norm.eps", lambda eps: 0.1),
    ("mlp.drop1.p", lambda p: 1.0),
]


@needs_fused
@pytest.mark.parametrize("place, change", CHANGES)
def test_a_plan_is_made_again_where_the_block_has_changed(place, change):
    block, x = Block(24, rule="mamba", mlp_ratio=1.0), torch.randn(2, 7, 24)
    owner, _, name = place.rpartition(".")
    with torch.no_grad():
        before = block(x)
        setattr(attrgetter(owner)(block), name, change(attrgetter(place)(block)))
        y = block(x)
    mixed = x + block.mixer(block.norm(x))
    torch.testing.assert_close(y, mixed + block.mlp(block.norm2(mixed)))
    assert torch.equal(y, before) == (change is mirrored)


@needs_fused
@torch.no_grad()
def test_a_weight_that_is_no_parameter_is_read_at_each_call():
    block, x = Block(24), torch.randn(2, 7, 24)
    original = block.norm.weight
    del block.norm.weight
    block.norm.weight_orig = original
    for factor in (1, 3):
        block.norm.weight = factor * original.detach()
        torch.testing.assert_close(block(x), x + block.mixer(block.norm(x)))


@needs_fused
@pytest.mark.parametrize("setting", ["threads", "precision", "shape", "grid"])
def test_a_plan_is_made_again_for_another_call(setting):
    block, x = Block(24, d_conv=(3, 3)), torch.randn(2, 6, 24)
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    with torch.no_grad():
        block(x, [2, 3])
        first = plan_of(block)
        grid = [3, 2] if setting == "grid" else [2, 3]
        x = x[:1] if setting == "shape" else x
        try:
            torch.set_num_threads(threads + (setting == "threads"))
            torch.set_float32_matmul_precision("medium" if setting == "precision" else precision)
            y = block(x, grid)
            assert plan_of(block) not in (None, first)
        finally:
            torch.set_num_threads(threads)
            torch.set_float32_matmul_precision(precision)
        assert setting == "precision" or torch.equal(y, copy.deepcopy(block)(x, grid))


@needs_fused
def test_a_plan_is_neither_copied_nor_saved_and_goes_with_its_block():
    block, x = Block(24), torch.randn(2, 7, 24)
    with torch.no_grad():
        block(x)
    assert plan_of(block) is not None
    assert plan_of(copy.deepcopy(block)) is None and plan_of(pickle.loads(pickle.dumps(block))) is None
    block.mixer.owner = [block]  # a part that knows its block
    block(x)
    gone, part = weakref.ref(block), weakref.ref(block.mixer)
    block.mixer = nn.Identity()
    block(x)
    gc.collect()
    assert part() is None
    del block
    gc.collect()
    assert gone() is None


@needs_fused
def test_threads_share_the_plans_of_a_model():
    blocks = Blocks(*(Block(24, rule=rule, mlp_ratio=1.0) for rule in KERNEL_RULES))
    inputs = [torch.randn(2, 7, 24) for _ in range(16)]

    def run(x):
        with torch.no_grad():
            return [blocks(x) for _ in range(20)]

    expected = [blocks(x) for x in inputs]
    with ThreadPoolExecutor(8) as pool:
        for results, y in zip(pool.map(run, inputs), expected):
            assert all(torch.equal(result, y) for result in results)


def test_an_mlp_is_a_second_branch_which_may_be_dropped_too():
    block, x = Block(24, mlp_ratio=1.5, num_branches=4), torch.randn(2, 7, 24)
    assert block.mlp.fc1.weight.shape == (72, 24) and block.mlp.fc2.weight.shape == (24, 36)
    assert 0.9 < block.mlp.fc2.weight.abs().max() * (36 * 4) ** 0.5 <= 1  # as the mixer's out_proj
    mixed = x + block.mixer(block.norm(x))
    torch.testing.assert_close(block(x), mixed + block.mlp(block.norm2(mixed)))
    block.drop_path = nn.Dropout(1.0)
    assert torch.equal(block(x), x)


@needs_fused
@pytest.mark.parametrize("case", ["float64", "bfloat16", "autocast", "no sample", "shared", "bias", "exportable"])
def test_what_the_operator_does_not_take_is_composed(case, monkeypatch):
    monkeypatch.setattr(cpu, "has_bf16_products", lambda: False)
    x = torch.zeros(0, 7, 24) if case == "no sample" else torch.randn(2, 7, 24)
    block = Block(24, shared_directions=case == "shared")
    if case == "exportable":
        make_exportable(block)
    if case == "bias":
        block.mixer.out_proj = nn.Linear(48, 24)
    if case == "float64":
        block, x = block.double(), x.double()
    if case == "bfloat16":
        block = block.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
        assert "vilonghorn::block" not in operators(lambda: block(x))
        y = block(x)
    assert y.shape == x.shape and y.dtype == x.dtype and y.isfinite().all()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=needs_compiler)])
def test_training_on_grids_of_any_size_compiles_once(backend):
    torch._dynamo.reset()
    counters.clear()
    options = dict(rule="longhorn_exact", d_conv=(3, 3), expand=1, num_heads=2, mlp_ratio=1.0)
    blocks = Blocks(*(Block(8, reverse=(flag,), **options) for flag in (False, True)))
    compiled = torch.compile(blocks, fullgraph=True, dynamic=True, backend=backend)
    for batch, rows, columns in ((2, 4, 6), (3, 9, 5), (4, 7, 8)):
        x = torch.randn(batch, rows * columns + 1, 8, requires_grad=True)
        expected, actual = (function(x, [rows, columns]) for function in (blocks, compiled))
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
        grads = (torch.autograd.grad(y.square().sum(), [x, *blocks.parameters()]) for y in (expected, actual))
        for a, b in zip(*grads):
            torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-4)
    assert counters["stats"]["unique_graphs"] == 1


@needs_amx
def test_under_autocast_the_operators_take_bfloat16_factors():
    block, x = Block(24, mlp_ratio=1.0), torch.randn(2, 7, 24)
    expected = block(x)
    with products("autocast"):
        assert "vilonghorn::block" in operators(lambda: block(x))
        y = block(x)
    y.square().sum().backward()
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
    assert y.dtype == torch.float32 and not torch.equal(y, expected)
    with products("medium"):
        assert torch.equal(block(x), y)


@needs_fused
@pytest.mark.parametrize("name, limits", [("vilonghornv2_tiny", (11, 40, 560)), ("vilonghorn_tiny", (12, 40, 760))])
def test_a_forward_pass_enters_few_files_and_functions(name, limits):
    found = count(timm.create_model(name, img_size=32).eval(), torch.randn(1, 3, 32, 32))
    assert all(number <= limit for number, limit in zip(found.values(), limits)), found
