"""The linear layer of weights that autocast converts: against torch's own layers, in gradients of every dtype."""

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from timm.layers import DropPath
from torch import nn

from vilonghorn.layers import Block, Blocks, short_linear
from vilonghorn.layers.short_linear import short_linear as linear
from vilonghorn.ops.backends import cpu as native

GATED = dict(rule=None, reverse=(False,), d_conv=(3, 3), expand=1)


def rand(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=dtype)


@pytest.mark.parametrize("with_stream", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_and_gradients_are_those_of_a_linear_layer(dtype, with_stream):
    weight, x = rand(5, 8).requires_grad_(), rand(2, 3, 8, dtype=dtype).requires_grad_()
    stream, dy = rand(2, 3, 5, dtype=dtype).requires_grad_(), rand(2, 3, 5, dtype=dtype)
    given = [x, weight, *([stream] if with_stream else [])]
    y = linear(x, weight.detach().to(dtype), weight, stream if with_stream else None)
    expected = F.linear(x.double(), weight.to(dtype).double()) + (stream.double() if with_stream else 0)
    tolerance = dict(rtol=2e-2, atol=2e-2, check_dtype=False)
    torch.testing.assert_close(y, expected, **tolerance)
    grads, expected_grads = (torch.autograd.grad(t, given, dy.to(t)) for t in (y, expected))
    assert [grad.dtype for grad in grads] == [t.dtype for t in given]
    for grad, other in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, other, **tolerance)


def test_only_the_gradients_that_are_wanted_are_computed(monkeypatch):
    weight, x, products = rand(5, 8), rand(3, 8, dtype=torch.bfloat16).requires_grad_(), []
    monkeypatch.setattr(short_linear, "product", lambda *args: products.append(args))
    linear(x, weight.to(x), weight).sum().backward()
    assert x.grad.isfinite().all() and not products


def test_cublas_writes_the_gradient_of_a_weight_in_float32(monkeypatch):
    a, b = rand(4, 6, dtype=torch.bfloat16), rand(6, 5, dtype=torch.bfloat16)
    monkeypatch.setattr(short_linear, "runs_cublas", lambda _: True)
    monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype: a.to(out_dtype) @ b.to(out_dtype))
    assert torch.equal(short_linear.product(a, b, torch.float32), a.float() @ b.float())
    assert torch.equal(short_linear.product(a, b, torch.bfloat16), a @ b)


@pytest.fixture
def stream(monkeypatch):
    """Tokens of a residual stream in bfloat16, on a CPU without its library, which takes the way of a GPU."""
    monkeypatch.setattr(native, "_reason", "not built")
    return rand(2, 12, 16, dtype=torch.bfloat16).requires_grad_()


def run(blocks, x, **options):
    with torch.autocast("cpu", torch.bfloat16):
        y = blocks(x, [3, 4], **options)
    return [y, *torch.autograd.grad(y.float().square().sum(), [x, *blocks.parameters()])]


def test_the_stream_is_added_by_the_last_product_where_nothing_is_between_them(stream, monkeypatch):
    block, added = Block(16, **GATED), []
    monkeypatch.setattr(torch, "addmm", lambda *args, addmm=torch.addmm: added.append(args) or addmm(*args))
    results = {"plain": run(block, stream)}
    block.drop_path = DropPath(0.5).eval()
    results["not training"] = run(block, stream)
    assert len(added) == 2
    block.drop_path = nn.Sequential()  # an identity of another class
    results["another class"] = run(block, stream)
    block.drop_path = nn.Identity()
    block.drop_path.register_forward_hook(lambda *_: None)
    results["hook"] = run(block, stream)
    with torch.autocast("cpu", torch.bfloat16):
        wide = block(stream.float(), [3, 4])
    assert len(added) == 2 and wide.dtype == torch.float32
    for values in results.values():
        for value, expected in zip(values, results["plain"], strict=True):
            torch.testing.assert_close(value, expected, rtol=2e-2, atol=4e-2)


def test_an_mlp_runs_by_its_weights_unless_a_part_of_it_is_replaced(stream, monkeypatch):
    block, added = Block(16, mlp_ratio=0.5, **GATED), []
    monkeypatch.setattr(torch, "addmm", lambda *args, addmm=torch.addmm: added.append(args) or addmm(*args))
    expected = run(block, stream)
    assert len(added) == 2
    block.mlp.fc1 = nn.Sequential(block.mlp.fc1)
    replaced = run(block, stream)
    assert len(added) == 3  # that of the mixer
    block.mlp.fc1 = block.mlp.fc1[0]
    block.mlp.act.register_forward_hook(lambda *_: None)
    hooked = run(block, stream)
    assert len(added) == 4
    for values in (replaced, hooked):
        for value, other in zip(values, expected, strict=True):
            torch.testing.assert_close(value, other, rtol=4e-2, atol=6e-2)


@pytest.mark.filterwarnings("ignore:vilonghorn scans")
def test_checkpointed_and_compiled_blocks_give_what_eager_ones_give(stream):
    blocks = Blocks(Block(16, **GATED), Block(16, d_conv=(3, 3), mlp_ratio=0.5))
    eager = run(blocks, stream)
    assert eager[0].dtype == torch.bfloat16
    for value, expected in zip(run(blocks, stream, checkpointing=True), eager, strict=True):
        assert torch.equal(value, expected)
    torch._dynamo.reset()
    for value, expected in zip(run(torch.compile(blocks, fullgraph=True, backend="aot_eager"), stream), eager):
        torch.testing.assert_close(value, expected, rtol=5e-2, atol=5e-2)


def test_an_empty_batch_and_a_result_that_is_changed_in_place_run(stream):
    block = Block(16, mlp_ratio=0.5, **GATED)
    assert all(value.isfinite().all() for value in run(block, stream[:0].detach().requires_grad_()))
    with torch.autocast("cpu", torch.bfloat16):
        y = block(stream, [3, 4])
        y += block(y.clone(), [3, 4])
    y.sum().backward()
    assert stream.grad.isfinite().all() and stream.grad.any()


def test_gradients_can_be_differentiated_again(stream):
    block = Block(16, mlp_ratio=0.5, **GATED)

    def second(block, x):
        (dx,) = torch.autograd.grad(block(x, [3, 4]).double().square().sum(), x, create_graph=True)
        return torch.autograd.grad(dx.double().square().sum(), list(block.parameters()))

    with torch.autocast("cpu", torch.bfloat16):
        found = second(block, stream)
    for value, expected in zip(found, second(deepcopy(block).double(), stream.detach().double().requires_grad_())):
        assert (value - expected).norm() < 0.02 * expected.norm()


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms_hooks_on_all_modules_and_tracing_run_the_layers(stream):
    block, seen = Block(16, mlp_ratio=0.5, **GATED), []
    assert torch.fx.symbolic_trace(block).graph.find_nodes(op="call_module", target="mlp.fc2")
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected = block(stream, [3, 4])
        found = torch.func.vmap(lambda x: block(x[None], [3, 4])[0])(stream)
        with nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module)):
            hooked = block(stream, [3, 4])
    for value in (found, hooked):
        torch.testing.assert_close(value, expected, rtol=2e-2, atol=4e-2)
    assert {block.mixer, block.mixer.out_proj, block.mlp, block.mlp.fc2, block.drop_path} <= set(seen)
