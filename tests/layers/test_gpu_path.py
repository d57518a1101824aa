"""What a block asks of a GPU, on tensors that only claim to be there or on a CPU without its library."""

from collections import Counter

import pytest
import timm
import torch
from oracle import KERNEL_RULES
from own_operators import OwnOperators
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from vilonghorn.layers import Block
from vilonghorn.ops.arguments import ScanArguments
from vilonghorn.ops.backends import choose, cuda
from vilonghorn.ops.backends import cpu as native
from vilonghorn.ops.backends import triton as triton_backend


def passes_of(rule: str, device: str, autocast: bool):
    """A block on a device, its input and its output."""
    block = Block(32, rule=rule, d_state=16, device=device)
    x = torch.ones(2, 9, 32, device=device, requires_grad=True)
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        return block, x, block(x)


@pytest.mark.filterwarnings("ignore:vilonghorn scans")
@pytest.mark.parametrize("rule", KERNEL_RULES)
def test_under_autocast_activations_are_bfloat16_and_parameters_of_gates_float32(rule, monkeypatch):
    """On a CPU without its library, which takes the same way; torch has no autocast for a GPU that is not there."""
    monkeypatch.setattr(native, "_reason", "not built")
    with OwnOperators() as own:
        block, x, y = passes_of(rule, "cpu", autocast=True)
        grads = torch.autograd.grad(y, [x, *block.parameters()], torch.ones_like(y))
    assert own.names == ["scan", "scan_backward"]
    (u, dt, k, q, z, A, D, dt_bias, *_) = own.arguments[0]
    assert {t.dtype for t in (u, dt, k, q, z)} == {torch.bfloat16}
    assert {t.dtype for t in (A, D, dt_bias) if t is not None} == {torch.float32}
    assert {t.dtype for t in (y, *grads)} == {torch.float32} and all(t.isfinite().all() for t in grads)


class Conversions(TorchDispatchMode):
    """Counts how often each parameter of a module is converted to another dtype, alone or joined to others."""

    def __init__(self, module):
        super().__init__()
        self.names = {parameter.data_ptr(): name for name, parameter in module.named_parameters()}
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        if function is torch.ops.aten.cat.default:
            self.counts.update(self.names[t.data_ptr()] for t in args[0] if t.data_ptr() in self.names)
        elif function is torch.ops.aten._to_copy.default and args[0].dtype != result.dtype:
            self.counts[self.names.get(args[0].data_ptr(), "other")] += 1
        return result


@pytest.mark.filterwarnings("ignore:vilonghorn scans")
def test_under_autocast_no_weight_is_converted_twice_in_a_step(monkeypatch):
    monkeypatch.setattr(native, "_reason", "not built")
    model = timm.create_model("vilonghornv2_nano", img_size=32, num_classes=3)
    with Conversions(model) as conversions, torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.ones(1, 3, 32, 32)).sum()
        loss.backward()
    del conversions.counts["other"]
    assert {"stages.0.blocks.0.mixer.in_proj.weight", "stages.2.blocks.0.mlp.fc1.weight"} < conversions.counts.keys()
    assert max(conversions.counts.values()) == 1


@pytest.mark.filterwarnings("ignore:vilonghorn scans")
def test_the_way_of_a_gpu_compiles_into_one_graph(monkeypatch):
    monkeypatch.setattr(native, "_reason", "not built")
    torch._dynamo.reset()
    block, x = Block(32), torch.randn(2, 9, 32)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    results = []
    for network in (block, compiled):
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = network(leaf)
        results.append([y, *torch.autograd.grad(y, [leaf, *block.parameters()], torch.ones_like(y))])
    for eager, graph in zip(*results):
        torch.testing.assert_close(graph, eager, rtol=1e-2, atol=1e-2)


def test_the_backends_of_a_gpu_come_in_the_order_of_preference(monkeypatch):
    monkeypatch.setattr(triton_backend, "unavailable", lambda device_type, dtype=None: None)
    with FakeTensorMode():
        args = ScanArguments(*(torch.empty(1, 1, 3, 2, device="cuda"),) * 4)
        assert choose(args) is triton_backend
        monkeypatch.setattr(cuda, "unavailable", lambda device_type, dtype=None: None)
        assert choose(args) is cuda
