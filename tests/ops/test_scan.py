"""The CPU's backends against the float64 oracle: values and gradients, at odd shapes."""

from functools import partial
from unittest import mock

import pytest
import torch
from marks import needs_native
from oracle import KERNEL_RULES, compare, flags, inputs, value_and_grads
from scans import *  # noqa: F403

from vilonghorn.ops import backends, scan
from vilonghorn.ops.backends import cpu as native

BACKENDS = [name for name in ("cpu", "reference") if backends("cpu")[name] == "ready"]
SHAPES = [
    (1, 1, 1, 1, 16),
    (1, 2, 2, 5, 16),
    (2, 1, 63, 40, 16),
    (2, 2, 33, 17, 5),
    (3, 1, 65, 8, 1),
    (1, 1, 40, 33, 64),
]
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-12}
PAIRS = [(torch.float32, g, r) for g, r in ((True, "none"), (False, "mean"))]
PAIRS += [(torch.float64, g, r) for g, r in ((True, "mean"), (False, "none"))]


@pytest.fixture(params=BACKENDS)
def backend(request) -> str:
    return request.param


@pytest.fixture(params=KERNEL_RULES)
def rule(request) -> str:
    return request.param


@pytest.mark.parametrize("dtype, gate, reduce", PAIRS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_backend_agrees_with_the_oracle(shape, rule, reduce, gate, dtype, backend):
    values = inputs(*shape, rule=rule, gate=gate, state=gate, dtype=dtype)
    options = dict(rule=rule, reverse=flags(shape[0]), reduce=reduce, return_state=gate)
    compare(partial(scan, backend=backend), values, TOLERANCE[dtype], **options)


def test_a_backend_agrees_with_the_oracle_at_the_size_of_an_image_with_any_optional_input(rule, backend):
    values = inputs(2, 1, 197, 384, 16, rule=rule)
    compare(partial(scan, backend=backend), values, 2e-6, rule=rule, reverse=(True, False), reduce="mean")
    for present in ("z", "D", "dt_bias"):
        some = inputs(2, 1, 17, 9, 16, rule=rule)
        some = {name: value for name, value in some.items() if name not in {"z", "D", "dt_bias"} - {present}}
        compare(partial(scan, backend=backend), some, 1e-6, rule=rule, reverse=(False, True), reduce="mean")


def test_extreme_steps_and_keys_are_finite_and_small_steps_keep_their_precision(rule, backend):
    """softplus(-12) is 6e-6: computed as log(1 + e) in float32 it would keep one digit."""
    small = inputs(1, 1, 6, 8, 16, rule=rule, gate=False)
    compare(partial(scan, backend=backend), small | dict(dt=small["dt"] - 12), 1e-6, rule=rule)
    for scale in (0.0, 1e-3, 30.0, 1e3):
        values = inputs(1, 1, 12, 5, 16, rule=rule)
        values |= dict(dt=values["dt"] * scale, k=values["k"] * min(scale, 30.0), z=values["z"] * scale)
        for name, result in value_and_grads(partial(scan, backend=backend), values, rule=rule).items():
            assert result.isfinite().all(), (scale, name)


@needs_native
@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("states", [16, 3])
def test_every_instruction_set_agrees_with_the_oracle(rule, states, isa):
    values = inputs(2, 2, 37, 41, states, rule=rule)
    with mock.patch.object(native, "_isa", native.isas()[isa]):
        compare(partial(scan, backend="cpu"), values, 1e-6, rule=rule, reverse=(False, True), reduce="mean")


@needs_native
@pytest.mark.parametrize("threads", [1, 2, 7])
def test_any_number_of_threads_gives_the_oracles_result(threads, rule):
    values = inputs(2, 1, 45, 100, 16, rule=rule)  # one sequence: backward must split over channels
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        compare(partial(scan, backend="cpu"), values, 1e-6, rule=rule, reverse=(False, True), reduce="mean")
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_costs_only_the_rounding_of_inputs_and_outputs(dtype, rule, backend):
    values = inputs(2, 2, 41, 24, 16, rule=rule, dtype=dtype)
    for name in ("A", "D", "dt_bias"):
        if name in values:
            values[name] = values[name].float()
    compare(partial(scan, backend=backend), values, 2 * torch.finfo(dtype).eps, rule=rule, reverse=(False, True))


@needs_native
def test_the_native_kernel_writes_every_element(rule, monkeypatch):
    values = inputs(2, 2, 35, 19, 16, rule=rule)
    run = partial(
        value_and_grads, partial(scan, backend="cpu"), values, rule=rule, reverse=(False, True), reduce="mean"
    )
    expected = run()
    empty = torch.empty
    monkeypatch.setattr(native.torch, "empty", lambda *size, **kw: empty(*size, **kw).fill_(float("nan")))
    for name, result in run().items():
        assert torch.equal(result, expected[name]), name
