"""`mamba_inner` on a GPU without a GPU: its kernels, compiled for the emulator in `kernels/`, against the oracle."""

import importlib

import pytest
import torch
from oracle import KERNEL_RULES, compare, flags, mixer, mixer_inputs, value_and_grads
from torch._dynamo.testing import CompileCounterWithBackend

from vilonghorn.ops import mamba_inner
from vilonghorn.ops.arguments import LAYOUTS, MambaInnerArguments
from vilonghorn.ops.backends import cpu

NAMES = LAYOUTS[MambaInnerArguments].tensors
# G, B, L, D, N, R, K, and heads
SHAPES = [
    ((1, 1, 1, 2, 1, 1, 4), None),
    ((2, 2, 1, 6, 16, 2, 4), 1),
    ((2, 2, 21, 6, 3, 2, 4), None),
    ((3, 1, 17, 70, 16, 5, 4), 5),  # composed
    ((2, 1, 9, 34, 14, 3, 4), None),
    ((2, 1, 9, 34, 14, 3, 2), None),  # composed
]


@pytest.fixture(autouse=True)
def gpu(emulator, monkeypatch):
    """No native library: the way of a GPU."""
    monkeypatch.setattr(cpu, "_reason", "not built")


@pytest.mark.parametrize("rule", KERNEL_RULES)
@pytest.mark.parametrize("shape, heads", SHAPES, ids=str)
def test_it_agrees_with_the_oracle(shape, heads, rule):
    values = mixer_inputs(*shape, rule=rule, heads=heads)
    compare(mamba_inner, values, 2e-6, truth=mixer, rule=rule, reverse=flags(shape[0]))


# B, D, then rows and columns of the grid
GRIDS = [(2, 70, 4, 5), (1, 6, 1, 1), (3, 4, 3, 3), (1, 2, 2, 37), (1, 64, 5, 1)]


@pytest.mark.parametrize("rule", ["longhorn_exact", "mamba"])
@pytest.mark.parametrize("B, D, rows, columns", GRIDS)
def test_with_a_convolution_over_the_grid_it_agrees_with_the_oracle(B, D, rows, columns, rule, monkeypatch):
    module = importlib.import_module("vilonghorn.ops.mamba_inner")
    monkeypatch.setattr(module, "conv2d_silu", None)  # the composed form would call it
    values = mixer_inputs(1, B, rows * columns, D, 3, 2, 9, rule=rule, filters=(3, 3))
    options = dict(rule=rule, reverse=(B == 1,), grid=(rows, columns))
    compare(mamba_inner, values, 2e-6, truth=mixer, **options)
    if D > 8:  # a slice whose channels are not aligned in pairs
        wide = torch.cat([values["xz"][..., :1], values["xz"]], -1)
        expected = mamba_inner(**values, **options)
        assert torch.equal(mamba_inner(**values | {"xz": wide[..., 1:]}, **options), expected)


# B, D, then rows and columns of the grid: around the rows and the segments of a thread
GATED = [(2, 6, 5, 7), (1, 5, 1, 1), (2, 70, 9, 3), (1, 8, 4, 70), (3, 4, 13, 9), (1, 2, 2, 17)]


def gated_inputs(B, D, rows, columns, class_tokens=0):
    return mixer_inputs(1, B, rows * columns + class_tokens, D, 1, 1, 9, rule="none", filters=(3, 3))


@pytest.mark.parametrize("B, D, rows, columns", GATED)
def test_a_gated_convolution_is_one_operator_and_agrees_with_the_oracle(B, D, rows, columns, monkeypatch):
    monkeypatch.setattr(importlib.import_module("vilonghorn.ops.mamba_inner"), "mamba_inner_composed", None)
    values = gated_inputs(B, D, rows, columns)
    options = dict(rule="none", reverse=(False,), grid=(rows, columns))
    compare(mamba_inner, values, 1e-6, truth=mixer, **options)
    first, again = (value_and_grads(mamba_inner, values, **options) for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)  # whatever the order of the threads
    wide = torch.cat([values["xz"][..., :1], values["xz"]], -1)  # a slice whose channels are not aligned
    assert torch.equal(mamba_inner(**values | {"xz": wide[..., 1:]}, **options), first["y"])


def test_a_gated_convolution_of_bfloat16_gives_the_float32_result_of_the_same_inputs_rounded():
    values, results = gated_inputs(2, 12, 6, 11), []
    short = values["xz"].bfloat16()
    for kind in (torch.bfloat16, torch.float32):
        leaves = {name: t.clone().requires_grad_() for name, t in (values | {"xz": short.to(kind)}).items()}
        y = mamba_inner(**leaves, rule="none", reverse=(False,), grid=(6, 11))
        dy = torch.linspace(-1, 1, y.numel()).view_as(y).bfloat16().to(kind)
        results.append([y, *torch.autograd.grad(y, [*leaves.values()], dy)])
    for half, full in zip(*results):
        assert torch.equal(half, full.to(half.dtype))


def test_a_nan_in_a_gated_convolution_reaches_the_patches_around_it_and_no_others():
    values = gated_inputs(1, 4, 9, 9)
    values["xz"][0, 5 * 9 + 4, 1] = torch.nan
    leaf = values["xz"].requires_grad_()
    y = mamba_inner(**values, rule="none", reverse=(False,), grid=(9, 9))
    [gradient] = torch.autograd.grad(y, leaf, torch.ones_like(y))
    for found, reach in ((y[..., 1], 1), (gradient[..., 1], 2), (gradient[..., 5], 1)):
        expected = torch.zeros(9, 9, dtype=torch.bool)
        expected[5 - reach : 6 + reach, 4 - reach : 5 + reach] = True
        assert torch.equal(found.isnan().view(9, 9), expected)
    assert not gradient[..., [0, 2, 3, 4, 6, 7]].isnan().any()


@pytest.mark.parametrize("filters, G, class_tokens", [((5, 3), 1, 0), ((3, 3), 2, 0), ((3, 3), 1, 1)])
def test_other_gated_convolutions_are_composed(filters, G, class_tokens):
    taps = filters[0] * filters[1]
    values = mixer_inputs(G, 1, 12 + class_tokens, 4, 1, 1, taps, rule="none", filters=filters)
    compare(mamba_inner, values, 2e-6, truth=mixer, rule="none", reverse=(False,) * G, grid=(3, 4))


@pytest.mark.parametrize("D, N, filters", [(5, 3, None), (6, 20, None), (4, 3, (1, 5))])
def test_what_the_operator_does_not_take_is_composed(D, N, filters):
    values, grid = mixer_inputs(2, 1, 12, D, N, 2, 5, rule="mamba", filters=filters), filters and (3, 4)
    values["xz"] = values["xz"].bfloat16()
    compare(mamba_inner, values, 3e-2, truth=mixer, rule="mamba", reverse=(False, True), grid=grid)


@pytest.mark.parametrize("rule, grid", [*((rule, None) for rule in KERNEL_RULES), ("longhorn", (4, 5))])
def test_bfloat16_costs_its_rounding(rule, grid):
    G, L, K = (1, 20, 9) if grid else (2, 21, 4)
    values = mixer_inputs(G, 2, L, 40, 16, 3, K, rule=rule, filters=(3, 3) if grid else None)
    values["xz"] = values["xz"].bfloat16()
    compare(mamba_inner, values, 3e-2, truth=mixer, rule=rule, reverse=flags(G), grid=grid)


@pytest.mark.parametrize(
    "rule, grids", [("mamba", [None]), ("longhorn", [(4, 5)]), ("mamba", [(4, 5), (7, 3), (2, 9)])], ids=str
)
def test_compiled_equals_eager_bit_for_bit_whatever_the_order_of_the_threads(rule, grids):
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(mamba_inner, fullgraph=True, dynamic=grids != [(4, 5)], backend=counter)
    for grid in grids:
        G, B, L, K = (1, 2, grid[0] * grid[1], 9) if grid else (2, 40, 9, 4)  # more than 32 partial sums of dD
        values = mixer_inputs(G, B, L, 34, 16, 3, K, rule=rule, filters=grid and (3, 3))
        options = dict(rule=rule, reverse=flags(G), grid=grid)
        first = value_and_grads(mamba_inner, values, **options)
        second = value_and_grads(compiled, values, **options)
        assert all(torch.equal(first[name], second[name]) for name in first)
    assert counter.frame_count < max(2, len(grids))  # sizes are symbols


@pytest.mark.parametrize("rule", ["longhorn", "mamba", "none"])
def test_the_operator_passes_torchs_checks(rule):
    values, options = mixer_inputs(2, 2, 9, 6, 3, 2, 4, rule=rule), ([False, True], [], False, True)
    if rule == "none":
        values, options = gated_inputs(2, 6, 3, 3), ([False], [3, 3, 3, 3], False, True)
        values["conv_weight"] = values["conv_weight"].flatten(2)
    leaves = [values[name].requires_grad_() if name in values else None for name in NAMES]
    torch.library.opcheck(torch.ops.vilonghorn.mamba_inner_cuda.default, (*leaves, rule, *options))


@pytest.mark.parametrize("B, L", [(0, 3), (2, 0)])
def test_without_tokens_the_gradients_of_weights_are_zero(B, L):
    values = mixer_inputs(2, B, L, 6, 3, 2, 4, rule="mamba")
    results = value_and_grads(mamba_inner, values, rule="mamba", reverse=(False, True))
    assert all((result == 0).all() for result in results.values())


def test_strided_inputs_are_read_in_place(monkeypatch):
    values = mixer_inputs(2, 2, 9, 8, 16, 2, 4, rule="longhorn")
    expected = mamba_inner(**values)
    wide = torch.full((2, 9, 3, 16), float("nan"))
    wide[:, :, 1] = values["xz"]
    monkeypatch.setattr(torch.Tensor, "clone", None)
    assert torch.equal(mamba_inner(**values | {"xz": wide[:, :, 1]}), expected)


def test_autocast_converts_what_linear_layers_convert():
    values = mixer_inputs(2, 2, 9, 8, 16, 2, 4, rule="longhorn")
    with torch.autocast("cpu", torch.bfloat16):
        y = mamba_inner(**values)
    short = {name: t.bfloat16() if name in ("xz", "x_proj", "dt_proj") else t for name, t in values.items()}
    assert torch.equal(y, mamba_inner(**short))
