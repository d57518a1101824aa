"""Tests that the kernels of every backend of the scan pass: on a CPU, in the emulator, in the interpreter.

A module imports them, and has fixtures `backend` and `rule`.
"""

from functools import partial

import pytest
import torch
from oracle import inputs, value_and_grads

from vilonghorn.ops import scan
from vilonghorn.ops.arguments import by_channel

GPU = ("cuda", "triton")


def test_a_nan_is_not_swallowed(backend, rule):
    for name in inputs(1, 1, 5, 4, 16, rule=rule):
        values = inputs(1, 1, 5, 4, 16, rule=rule)
        values[name].view(-1)[0] = torch.nan
        assert scan(**values, rule=rule, backend=backend)[0, 0, :, 0].isnan().any(), name


@pytest.mark.parametrize("shape", [(2, 0, 3, 4, 16), (1, 2, 0, 4, 16), (2, 1, 3, 0, 16)], ids=str)
def test_empty_tensors_give_empty_results_and_zero_gradients(shape, backend, rule):
    values = inputs(*shape, rule=rule, state=True)
    run = partial(scan, backend=backend, rule=rule, reverse=(False, True)[: shape[0]], return_state=True)
    results = value_and_grads(run, values)
    assert results["y"].shape == values["x"].shape
    state, gradient = results.pop("state"), results.pop("initial_state")
    assert torch.equal(state, values["initial_state"].double()) and (gradient.numel() == 0 or gradient.any())
    assert all((result == 0).all() for result in results.values())


def test_slices_of_wider_tensors_give_what_their_copies_give(backend, rule):
    values, strided = inputs(2, 2, 5, 12, 16, rule=rule), {}
    expanded = values["z"][..., :1].expand(2, 5, 12)
    values["z"] = expanded.contiguous()
    for name, value in values.items():
        wide = torch.full((*value.shape[:-1], 2 * value.shape[-1] + 3), float("nan"))
        offset = {"x": 2, "dt": 1}.get(name, 3)  # dt begins between two pairs
        strided[name] = wide[..., offset : offset + value.shape[-1]].copy_(value)
    strided["dt"] = values["dt"].permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    strided["z"] = expanded
    run = partial(scan, backend=backend, rule=rule, reverse=(False, True), reduce="mean")
    expected, actual = value_and_grads(run, values), value_and_grads(run, strided, keep_strides=True)
    rounding = 0 if backend in GPU else 1e-6  # torch's own sums differ in the last digit with the strides
    torch.testing.assert_close(actual, expected, rtol=rounding, atol=rounding)


FORMS = dict(longhorn=("none", torch.bfloat16), longhorn_exact=("mean", torch.bfloat16), mamba=("mean", torch.float32))


def test_the_operators_pass_opcheck(backend, rule):
    reduce, dtype = FORMS[rule]
    dtype = dtype if backend in GPU else torch.float32
    # Saved states hold 16 channels or a multiple of them. What pads fewer channels is not set, so it may differ.
    length = 3 if backend == "triton" else 9  # its interpreter is slow
    values = inputs(2, 1, length, 16, 16, rule=rule, state=rule == "mamba", dtype=dtype)
    channels_first = rule == "longhorn"
    if channels_first:
        del values["z"]
    tensors = [values.get(name) for name in ("x", "dt", "k", "q", "z", "A", "D", "dt_bias", "initial_state")]
    options = (rule, [False, True], reduce, backend, rule == "mamba", channels_first)
    leaves = [None if t is None else t.clone().requires_grad_() for t in tensors]
    torch.library.opcheck(torch.ops.vilonghorn.scan.default, (*leaves, *options, True))
    tensors[0] = tensors[0].mT.contiguous().mT  # gradients are contiguous whatever the strides of the inputs
    y, state, saved_states = torch.ops.vilonghorn.scan(*tensors, *options, True)
    assert torch.ops.vilonghorn.scan(*tensors, *options, False)[2].numel() == 0  # nothing is kept without gradients
    short = backend in GPU and rule != "longhorn_exact"
    assert saved_states.dtype == (dtype if short else torch.float32)
    dstate = torch.ones_like(state) if rule == "mamba" else None
    backward = (torch.ones_like(y), dstate, saved_states, *tensors, *options, [t is not None for t in tensors])
    torch.library.opcheck(torch.ops.vilonghorn.scan_backward.default, backward)


def test_a_repetition_gives_the_same_bits(backend, rule):
    run = partial(scan, backend=backend, rule=rule, reverse=(False, True), reduce="mean")
    first, second = (value_and_grads(run, inputs(2, 1, 9, 34, 3, rule=rule)) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_channels_first_gives_the_same_in_another_order_of_memory(backend, rule):
    for reverse, shape, gate in (((True,), (1, 2, 21, 18, 16), True), ((False, True), (2, 1, 5, 40, 3), False)):
        values = inputs(*shape, rule=rule, gate=gate, state=True)
        run = partial(scan, backend=backend, rule=rule, reverse=reverse, return_state=True)
        expected = value_and_grads(run, values)
        ordered = values | {n: by_channel(values[n]).copy_(values[n]) for n in ("x", "dt", "z") if n in values}
        for given in (ordered, values):
            actual = value_and_grads(partial(run, channels_first=True), given, keep_strides=True)
            torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
        leaves = {name: value.detach().requires_grad_() for name, value in ordered.items()}
        y, _ = run(**leaves, channels_first=True)
        results = y, *torch.autograd.grad(y.sum(), [leaves["x"], leaves["dt"]])
        assert all(t.permute(1, 0, 3, 2).is_contiguous() for t in results)
