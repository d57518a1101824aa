"""What torch asks of an operator beyond its result and first derivative: its tools see the operator, and what it cannot
differentiate is refused, not answered wrongly."""

import re

import pytest
import torch
from marks import needs_native
from oracle import block_inputs, inputs, mixer_inputs
from own_operators import OwnOperators
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.profiler import profile

from vilonghorn.ops import block, conv_silu, mamba_inner, register, rms_norm, scan
from vilonghorn.ops.arguments import LAYOUTS, BlockArguments

# Made here, because torch 2.11 cannot trace a random generator before dispatch.
VALUES = inputs(2, 1, 3, 4, 5, rule="longhorn")
MIXER = mixer_inputs(2, 1, 3, 4, 5, 2, 3, rule="longhorn")
BLOCK = block_inputs(2, 1, 3, 6, 5, 2, 3, 4, hidden=5)


def run_scan(x):
    return scan(**VALUES | dict(x=x.expand(2, 1, 3, 4)), reverse=(False, True))


def run_mamba_inner(x):
    return mamba_inner(**MIXER | dict(xz=torch.cat([x, x], -1)))


def run_block(x):
    return block(**dict.fromkeys(LAYOUTS[BlockArguments].tensors) | BLOCK | dict(x=x))


def run_conv(x):
    return conv_silu(x, torch.ones(2, 4, 3), torch.zeros(2, 4), reverse=(False, True))


OPERATORS = {
    "block": pytest.param(run_block, marks=needs_native),
    "scan": run_scan,
    "mamba_inner": pytest.param(run_mamba_inner, marks=needs_native),
    "conv_silu": pytest.param(run_conv, marks=needs_native),
    "rms_norm": pytest.param(lambda x: rms_norm(x, torch.ones(4)), marks=needs_native),
}
every_operator = pytest.mark.parametrize("run", OPERATORS.values(), ids=OPERATORS)


def tokens():
    return torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(0))


@every_operator
@pytest.mark.parametrize("loss", [torch.sum, lambda y: y.square().sum()], ids=["linear", "quadratic"])
def test_a_second_derivative_is_refused_even_where_the_cotangent_has_none(run, loss):
    x = tokens().requires_grad_()
    (dx,) = torch.autograd.grad(loss(run(x)), x, create_graph=True)
    with pytest.raises(RuntimeError, match="_backward has no derivative"):
        dx.square().sum().backward()


@every_operator
def test_a_forward_derivative_is_refused(run):
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="no forward-mode derivative; use reverse mode"):
        run(forward_ad.make_dual(tokens(), torch.ones(1, 3, 4)))
    with pytest.raises(RuntimeError, match="no forward-mode derivative; use reverse mode"):
        torch.func.jvp(run, (tokens(),), (torch.ones(1, 3, 4),))


@every_operator
def test_transforms_that_differentiate_are_refused(run):
    for transformed in (torch.func.grad(lambda x: run(x).sum()), torch.func.jacrev(run)):
        with pytest.raises(RuntimeError, match="no gradients inside torch.func.*make the model with exportable=True"):
            transformed(tokens())
    x = tokens().requires_grad_()
    y = run(x)
    with pytest.raises(RuntimeError, match="Batching rule not implemented"):
        torch.autograd.grad(y, x, torch.eye(y.numel()).view(-1, *y.shape), is_grads_batched=True)


@every_operator
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_runs_one_sample_after_the_other(run):
    batch = torch.stack([tokens(), -tokens(), 2 * tokens()], 1)
    mapped = torch.vmap(run, 1, randomness="same")  # `run` draws the other tensors
    torch.testing.assert_close(mapped(batch), torch.stack([run(x) for x in batch.unbind(1)]))


@every_operator
def test_a_call_that_saved_nothing_refuses_a_backward(run, monkeypatch):
    monkeypatch.setattr(register, "needs_grad", lambda tensors: False)
    monkeypatch.setattr(register, "sees_no_operators", lambda tensors: False)
    with pytest.raises(RuntimeError, match="save=False"):
        run(tokens().requires_grad_()).sum().backward()


@every_operator
def test_saved_tensors_are_unpacked_once_and_may_come_back_with_other_strides(run):
    x, packed, unpacked = tokens().requires_grad_(), [], []

    def unpack(t):
        unpacked.append(t)
        return torch.stack([t, t + 1], -1)[..., 0]

    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, unpack):
        y = run(x).square().sum()
    (dx,) = torch.autograd.grad(y, x)
    assert len(unpacked) == len(packed) > 0  # once each: non-reentrant checkpointing recomputes at each unpacking
    assert torch.equal(dx, *torch.autograd.grad(run(x).square().sum(), x))


@every_operator
def test_a_mode_and_a_profile_see_forward_and_backward(run):
    with OwnOperators() as mode:
        run(tokens().requires_grad_()).sum().backward()
    with profile() as profiled:
        run(tokens().requires_grad_()).sum().backward()
    events = (re.fullmatch(r"vilonghorn::(\w+)", event.name) for event in profiled.events())
    for seen in (mode.names, [event[1] for event in events if event]):
        assert len(seen) == 2 and seen[1] == f"{seen[0]}_backward"


@every_operator
def test_a_mode_for_functions_sees_the_operator(run):
    called = []

    class Calls(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            called.append(str(func))
            return func(*args, **kwargs or {})

    with Calls():
        run(tokens())
    assert sum(name.startswith("vilonghorn.") for name in called) == 1


@every_operator
def test_a_trace_before_dispatch_holds_the_operator_and_not_its_result(run):
    traced = make_fx(run, pre_dispatch=True)(tokens())
    assert sum(str(node.target).startswith("vilonghorn.") for node in traced.graph.nodes) == 1


@every_operator
def test_inference_mode_knows_no_gradients_even_where_they_are_enabled(run):
    x = tokens().requires_grad_()
    with torch.inference_mode(), torch.enable_grad():
        y = run(x)
    assert y.is_inference() and not y.requires_grad and torch.equal(y, run(tokens()))


@every_operator
def test_a_tensor_of_zeros_without_memory_is_taken_for_what_it_is(run):
    zeros = torch._efficientzerotensor((1, 3, 4))  # as a tangent of forward differentiation
    assert torch.equal(run(zeros), run(torch.zeros(1, 3, 4)))
    x = tokens().requires_grad_()
    y = run(x)
    assert not torch.autograd.grad(y, x, torch._efficientzerotensor(y.shape))[0].any()


@every_operator
def test_a_lazily_negated_tensor_is_taken_for_what_it_is(run):
    """Its memory holds the numbers without their sign."""
    x = tokens()
    negated = torch._neg_view(-x)  # as the imaginary part of a conjugate, but contiguous
    assert negated.is_neg() and torch.equal(negated, x)
    assert torch.equal(run(negated), run(x))
