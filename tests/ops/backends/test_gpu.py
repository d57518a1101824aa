"""The GPU backends on a GPU: values and gradients against the float64 oracle, streams, graphs, models, devices."""

from functools import partial

import pytest
import timm
import torch
from convolutions import CASES, check
from oracle import (
    KERNEL_RULES,
    compare,
    conv_inputs,
    error,
    flags,
    heads_inputs,
    heads_oracle,
    inputs,
    mixer,
    mixer_inputs,
    rms_norm,
    value_and_grads,
)

from vilonghorn.layers import Block
from vilonghorn.ops import backends, conv_silu, mamba_inner, scan
from vilonghorn.ops.backends import BACKENDS as BY_NAME

if not torch.cuda.is_available():
    pytest.skip("torch sees no CUDA device", allow_module_level=True)

BACKENDS = [name for name in ("cuda", "triton") if backends("cuda")[name] == "ready"]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 2e-3}
COMBINATIONS = [
    (name, dtype) for name in BACKENDS for dtype in TOLERANCE if not BY_NAME[name].unavailable("cuda", dtype)
]
SHAPES = [(1, 1, 1, 2, 16), (2, 2, 63, 40, 16), (2, 1, 65, 8, 5), (1, 1, 40, 34, 3), (2, 2, 197, 384, 16)]


@pytest.fixture(params=BACKENDS)
def backend(request) -> str:
    return request.param


@pytest.fixture
def device() -> str:
    return "cuda"


def on_gpu(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.cuda() for name, value in values.items()}


@pytest.mark.parametrize(("backend", "dtype"), COMBINATIONS, ids=str)
@pytest.mark.parametrize("gate", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("reduce", ["none", "mean"])
@pytest.mark.parametrize("rule", KERNEL_RULES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_backend_agrees_with_the_oracle(shape, rule, reduce, gate, dtype, backend):
    options = dict(rule=rule, reverse=flags(shape[0]), reduce=reduce)
    values = inputs(*shape, rule=rule, gate=gate, dtype=dtype)
    compare(partial(scan, backend=backend), values, TOLERANCE[dtype], device="cuda", **options)


# The last is split over time.
CHUNKED = [((2, 2, 197, 384, 16), 4), ((1, 1, 33, 40, 5), 1), ((2, 1, 1100, 64, 16), 2)]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape, heads", CHUNKED, ids=str)
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


@pytest.mark.parametrize("rule", KERNEL_RULES)
def test_small_cases_agree_with_the_oracle(rule, backend):
    """What gpu_day.sh runs under compute-sanitizer."""
    options = dict(rule=rule, reverse=(False, True))
    values = inputs(2, 1, 19, 34, 16, rule=rule)
    compare(partial(scan, backend=backend), values, 2e-6, "cuda", **options, reduce="mean")
    values = mixer_inputs(2, 2, 21, 34, 5, 2, 9, rule=rule, filters=(3, 3))
    compare(mamba_inner, values, 1e-5, "cuda", mixer, **options, grid=(4, 5))
    check("cuda" if backend == "cuda" else None, (2, 3, 33, 40, 4), (True, False), device="cuda")


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


# G, B, L, D, N, R, K; heads; rows and columns of a grid of 3 x 3 filters
MIXERS = [
    ((1, 1, 1, 2, 1, 1, 1), None, None),
    ((2, 2, 63, 40, 16, 3, 4), None, None),
    ((3, 1, 33, 70, 5, 4, 3), None, None),
    ((2, 2, 197, 384, 16, 12, 4), None, None),
    ((1, 2, 197, 384, 16, 4, 9), 4, (14, 14)),
    ((1, 2, 54, 72, 8, 2, 9), 2, (6, 9)),
    ((2, 1, 21, 6, 3, 2, 9), None, (4, 5)),
]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rule", KERNEL_RULES)
@pytest.mark.parametrize("shape, heads, grid", MIXERS, ids=str)
def test_a_mixer_agrees_with_the_oracle(shape, heads, grid, rule, dtype):
    values = mixer_inputs(*shape, rule=rule, heads=heads, filters=(3, 3) if grid else None)
    values["xz"] = values["xz"].to(dtype)
    options = dict(rule=rule, reverse=flags(shape[0]), grid=grid)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}[dtype]
    compare(mamba_inner, values, tolerance, "cuda", mixer, **options)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("B, D, rows, columns, tokens", [(2, 48, 56, 56, 3136), (1, 70, 9, 37, 334), (3, 5, 5, 7, 35)])
def test_a_gated_convolution_agrees_with_the_oracle(B, D, rows, columns, tokens, dtype):
    values = mixer_inputs(1, B, tokens, D, 1, 1, 9, rule="none", filters=(3, 3))
    values["xz"] = values["xz"].to(dtype)
    options = dict(rule="none", reverse=(False,), grid=(rows, columns))
    compare(mamba_inner, values, max(TOLERANCE[dtype], 1e-5), "cuda", mixer, **options)


@pytest.mark.skipif("cuda" not in BACKENDS, reason="the CUDA library is not ready")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows, channels", [(3136, 48), (25216, 192), (77, 768)])
def test_the_backward_of_a_norm_agrees_with_float64(rows, channels, dtype):
    x, dx, dy = (torch.randn(rows, channels, device="cuda").to(dtype) for _ in range(3))
    weight = torch.randn(channels, device="cuda")
    exact = [t.double().requires_grad_() for t in (x, weight)]
    y = rms_norm(*exact, 1e-5)
    expected = torch.autograd.grad([exact[0], y], exact, [dx.double(), dy.double()])
    found = BY_NAME["cuda"].norm_backward(dy, dx, x, weight, 1e-5)
    assert error(found[0], expected[0]) < TOLERANCE[dtype] and error(found[1], expected[1]) < 1e-5


@pytest.mark.parametrize("shape, heads, grid", [MIXERS[1], MIXERS[5]], ids=str)
def test_a_mixer_without_the_cuda_library_agrees_with_the_oracle(shape, heads, grid, monkeypatch):
    monkeypatch.setattr(BY_NAME["cuda"], "unavailable", lambda *_: "switched off")
    values = mixer_inputs(*shape, rule="longhorn_exact", heads=heads, filters=(3, 3) if grid else None)
    options = dict(rule="longhorn_exact", reverse=flags(shape[0]), grid=grid)
    compare(mamba_inner, values, 1e-5, "cuda", mixer, **options)


@pytest.mark.parametrize("heads", [1, None], ids=["chunks", "tokens"])
@pytest.mark.parametrize("B, L, D", [(70_000, 3, 4), (2_100, 16_384, 64)], ids=["batch", "elements"])
def test_more_sequences_than_a_grid_axis_or_32_bits_can_count(B, L, D, heads, backend):
    """The first and the last sequences are as if alone."""
    if heads and backend == "cuda":
        pytest.skip("chunks run on Triton")
    make = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    values = dict(x=make(1, B, L, D), dt=make(1, B, L, heads or D), k=make(1, B, L, 4), q=make(1, B, L, 4))
    run = partial(scan, rule="longhorn_exact", backend=backend)
    with torch.set_grad_enabled(L < 100):
        leaves = {name: value.requires_grad_(L < 100) for name, value in values.items()}
        y = run(**leaves)
        for part in (slice(0, 2), slice(B - 2, B)):
            few = {name: value[:, part].detach().requires_grad_(L < 100) for name, value in leaves.items()}
            alone = run(**few)
            assert error(y[:, part].detach(), alone.detach()) < 1e-6
            if L < 100:
                wanted = torch.autograd.grad(alone.float().sum(), [*few.values()])
                found = torch.autograd.grad(y.float().sum(), [*leaves.values()], retain_graph=True)
                assert all(error(f[:, part], w) < 1e-2 for f, w in zip(found, wanted))


def step_of(block, x):
    """Output and gradients of a block under autocast."""
    with torch.autocast("cuda", torch.bfloat16):
        y = block(x, [14, 14])
    return [y, *torch.autograd.grad(y.float().square().sum(), [x, *block.parameters()])]


BLOCKS = {
    "first": dict(rule="longhorn"),
    "v2": dict(rule="longhorn_exact", num_heads=4, reverse=(False,), d_conv=(3, 3), expand=1, mlp_ratio=2.0),
}


@pytest.mark.parametrize("family", BLOCKS)
def test_a_captured_training_step_gives_the_bits_of_an_eager_one(family):
    block, x = Block(192, **BLOCKS[family]).cuda(), torch.randn(4, 196, 192, device="cuda", requires_grad=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            expected = step_of(block, x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step_of(block, x)
    for t in captured:
        t.detach().zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, e) for a, e in zip(captured, expected))


@pytest.mark.parametrize("name", ["vilonghorn_nano", "vilonghornv2_nano", "vim_nano", "vilonghorn_nano_shared"])
@pytest.mark.parametrize("device", [f"cuda:{i}" for i in range(torch.cuda.device_count())][:2])
def test_a_model_trains_as_on_the_cpu(name, device, monkeypatch):
    """On a second device, too, which is not the current one."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # of the convolutions around the blocks
    model, images, results = timm.create_model(name, img_size=64, num_classes=5), torch.randn(2, 3, 64, 64), []
    for place in ("cpu", device):
        model.to(place).zero_grad()
        logits = model(images.to(place))
        logits.square().sum().backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters()}  # model.to moves p.grad
        results.append({"logits": logits.detach(), **grads})
    on_cpu, on_gpu = results
    errors = {n: error(on_gpu[n].cpu(), on_cpu[n]) for n in on_cpu}
    assert max(errors.values()) < 1e-3, {n: f"{e:.1e}" for n, e in errors.items() if e >= 1e-3}


@pytest.mark.parametrize("name", ["vilonghorn_nano", "vilonghornv2_nano"])
def test_a_model_in_bfloat16_is_as_close_to_float32_as_on_the_cpu(name):
    model, images = timm.create_model(name, img_size=64, num_classes=5), torch.randn(4, 3, 64, 64)
    found = {}
    for place, enabled in (("cpu", False), ("cpu", True), ("cuda", True)):
        model.to(place).zero_grad()
        with torch.autocast(place, torch.bfloat16, enabled=enabled):
            logits = model(images.to(place)).float()
        logits.square().sum().backward()
        grads = torch.cat([p.grad.flatten().float().cpu() for p in model.parameters()])
        found[place, enabled] = logits.detach().cpu(), grads
    exact, on_cpu, on_gpu = found.values()
    for gpu, cpu, truth in zip(on_gpu, on_cpu, exact):
        assert error(gpu, truth) < 2 * error(cpu, truth) + 1e-3


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_model_makes_the_updates_of_an_eager_one(mode):
    weights = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = timm.create_model("vilonghornv2_nano", img_size=64, num_classes=5).cuda()
        optimizer, images = torch.optim.SGD(model.parameters(), 1e-2), torch.randn(4, 3, 64, 64, device="cuda")
        forward = torch.compile(model, mode=mode) if compiled else model
        for _ in range(3):
            forward(images).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert error(weights[1], weights[0]) < 1e-3
