"""The GPU backends on a GPU: values and gradients against the float64 oracle, streams, repetition."""

from functools import partial

import pytest
import torch
from convolutions import CASES, check
from oracle import (
    KERNEL_RULES,
    compare,
    conv_inputs,
    heads_inputs,
    heads_oracle,
    inputs,
    mixer,
    mixer_inputs,
    value_and_grads,
)

from vilonghorn.ops import backends, conv_silu, mamba_inner, scan

if not torch.cuda.is_available():
    pytest.skip("torch sees no CUDA device", allow_module_level=True)

BACKENDS = [name for name in ("cuda", "triton") if backends("cuda")[name] == "ready"]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
SHAPES = [(1, 1, 1, 1, 16), (2, 2, 63, 40, 16), (3, 1, 65, 8, 5), (1, 1, 40, 33, 64), (2, 2, 197, 384, 16)]


@pytest.fixture(params=BACKENDS)
def backend(request) -> str:
    return request.param


@pytest.fixture
def device() -> str:
    return "cuda"


def on_gpu(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.cuda() for name, value in values.items()}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("gate", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("reduce", ["none", "mean"])
@pytest.mark.parametrize("rule", KERNEL_RULES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_backend_agrees_with_the_oracle(shape, rule, reduce, gate, dtype, backend):
    options = dict(rule=rule, reverse=(False, True, True)[: shape[0]], reduce=reduce)
    values = inputs(*shape, rule=rule, gate=gate, dtype=dtype)
    compare(partial(scan, backend=backend), values, TOLERANCE[dtype], device="cuda", **options)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape, heads", [((2, 2, 197, 384, 16), 4), ((1, 1, 33, 40, 5), 1)], ids=str)
def test_chunks_in_triton_agree_with_the_oracle(shape, heads, dtype):
    reverse, values = (True, False)[: shape[0]], heads_inputs(*shape, heads, dtype=dtype)
    values |= dict(z=inputs(*shape, rule="longhorn_exact", dtype=dtype)["z"])
    run = partial(scan, rule="longhorn_exact", backend="triton")
    compare(run, values, max(TOLERANCE[dtype], 1e-5), device="cuda", truth=heads_oracle, reverse=reverse)


@pytest.mark.parametrize("rule", KERNEL_RULES)
def test_a_repetition_on_another_stream_gives_the_same_bits(rule, backend):
    values = on_gpu(inputs(2, 4, 197, 384, 16, rule=rule, dtype=torch.bfloat16))
    run = partial(
        value_and_grads, partial(scan, backend=backend), values, rule=rule, reverse=(False, True), reduce="mean"
    )
    expected, stream = run(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        again = run()
    torch.cuda.synchronize()
    assert all(torch.equal(again[name], expected[name]) for name in expected)


def test_slices_of_a_projection_are_read_right(backend):
    packed = torch.randn(2, 2, 50, 12 + 32, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    _, k, q = packed.split([12, 16, 16], -1)
    values = on_gpu(inputs(2, 2, 50, 64, 16, rule="longhorn"))
    options = dict(reverse=(True, False), reduce="mean", backend=backend)
    sliced, dense = (scan(**values | dict(k=a, q=b), **options) for a, b in ((k, q), (k.contiguous(), q.contiguous())))
    assert torch.equal(sliced, dense)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape, reverse", [*CASES, ((2, 2, 197, 384, 4), (False, True))], ids=str)
def test_a_convolution_agrees_with_the_oracle(shape, reverse, dtype):
    check(None, shape, reverse, dtype, device="cuda")


def test_a_convolution_repeats_bit_for_bit():
    values = on_gpu(conv_inputs(2, 32, 197, 384, 4))
    run = partial(value_and_grads, conv_silu, values, reverse=(False, True))
    first, again = run(), run()
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("rule", KERNEL_RULES)
@pytest.mark.parametrize("shape", [(1, 1, 1, 2, 1, 1, 1), (2, 2, 63, 40, 16, 3, 4), (3, 1, 33, 70, 5, 4, 3)], ids=str)
def test_a_mixer_agrees_with_the_oracle(shape, rule):
    def run(A=None, **values):
        return mamba_inner(A=A, **values)

    values, flags = mixer_inputs(*shape, rule=rule), (False, True, True)[: shape[0]]
    compare(run, values, 5e-6, truth=mixer, device="cuda", rule=rule, reverse=flags)
