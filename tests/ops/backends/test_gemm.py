"""The native matrix products against float64 and integers."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from marks import needs_amx, needs_native
from native_gemm import gemm, int8_product, int8_stem, linear, merged, stem

from vilonghorn.ops.backends import cpu

layouts = st.tuples(st.booleans(), st.integers(0, 3))


def matrix(rows: int, columns: int, layout: tuple[bool, int]) -> torch.Tensor:
    """Part of a wider one, and perhaps transposed."""
    transposed, spare = layout
    wide = torch.randn(columns, rows + spare).t() if transposed else torch.randn(rows, columns + spare)
    return wide[:rows, :columns]


@needs_native
@pytest.mark.parametrize("isa", cpu.isas())
@given(
    st.integers(1, 150), st.integers(1, 110), st.sampled_from([1, 2, 15, 16, 31, 192, 511, 513, 1100]), layouts, layouts
)
def test_every_instruction_set_multiplies(isa, rows, columns, depth, a_layout, b_layout):
    a, b = matrix(rows, depth, a_layout), matrix(depth, columns, b_layout)
    expected = a.double() @ b.double()
    with mock.patch.object(cpu, "_isa", cpu.isas()[isa]):
        torch.testing.assert_close(gemm(a, b).double(), expected, rtol=1e-5, atol=1e-4 * depth**0.5)


def bf16_product(a: torch.Tensor, b: torch.Tensor, parts: int) -> torch.Tensor:
    """In float64, the product of factors that are sums of `parts` bfloat16 values, without that of the second parts."""
    (a1, a2), (b1, b2) = ((t.bfloat16().double(), (t - t.bfloat16()).bfloat16().double()) for t in (a, b))
    return a1 @ b1 if parts == 1 else a1 @ (b1 + b2) + a2 @ b1


@needs_amx
@pytest.mark.parametrize("parts", [1, 2])
@given(
    st.integers(1, 300),
    st.integers(1, 110),
    st.sampled_from([1, 2, 15, 16, 31, 33, 192, 511, 513, 1100]),
    layouts,
    layouts,
    st.booleans(),
)
def test_a_product_of_bf16_parts_is_that_of_their_sums(parts, rows, columns, depth, a_layout, b_layout, adds):
    a, b = matrix(rows, depth, a_layout), matrix(depth, columns, b_layout)
    add = torch.randn(rows, columns) if adds else None
    expected = bf16_product(a, b, parts) + (0 if add is None else add)
    actual = gemm(a, b, add, parts).double()
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5 * depth**0.5)
    bound = 1e-5 * depth**0.5 + (2**-6.9, 2**-14)[parts - 1] * (a.abs().double() @ b.abs().double())
    assert ((actual - a.double() @ b.double() - (0 if add is None else add)).abs() <= bound).all()


@needs_native
@pytest.mark.parametrize("parts", [0, 1, 2])
@given(st.integers(2, 300), st.integers(1, 100), st.integers(1, 600), layouts, st.integers(0, 299))
def test_a_row_depends_on_neither_threads_nor_other_rows(parts, rows, columns, depth, layout, row):
    a, b, before = matrix(rows, depth, layout), torch.randn(depth, columns), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(gemm(a, b, None, parts))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    row %= rows
    assert torch.equal(gemm(a[row : row + 1].contiguous(), b, None, parts)[0], results[0][row])


@needs_native
@pytest.mark.parametrize("isa", cpu.isas())
@given(
    st.integers(1, 150),
    st.integers(1, 110),
    st.sampled_from([1, 2, 3, 4, 15, 31, 33, 192, 511, 2050]),
    st.integers(0, 3),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_every_instruction_set_multiplies_int8_to_the_same_bits(isa, rows, columns, depth, spare, adds, seed):
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(rows, depth + spare, generator=generator)[:, :depth]
    a[rows // 2] = 0
    b = torch.randint(-127, 128, (columns, depth), generator=generator, dtype=torch.int8)
    scale = torch.rand(columns, generator=generator)
    add = torch.randn(rows, columns, generator=generator) if adds else None
    with mock.patch.object(cpu, "_isa", cpu.isas()[isa]):
        actual = gemm(a, b.t(), add, b_scale=scale)
    assert torch.equal(actual, int8_product(a, b, scale, add))
    exact = a.double() @ (b.double() * scale.double()[:, None]).t() + (0 if add is None else add)
    bound = 0.51 * a.abs().amax(1, keepdim=True) / 127 * (b.abs().double() * scale.double()[:, None]).sum(1) + 1e-4
    assert ((actual - exact).abs() <= bound).all()


@needs_native
@pytest.mark.parametrize("options", [dict(bf16_parts=1), dict(bf16_parts=2), dict(b_scale=torch.ones(4))])
def test_a_product_keeps_what_is_not_finite(options):
    a, b = torch.ones(5, 40), torch.ones(4, 40, dtype=torch.int8 if "b_scale" in options else torch.float32)
    a[1, 3], a[3, 38] = torch.nan, torch.inf
    product = gemm(a, b.t(), **options)
    torch.testing.assert_close(product[[0, 2, 4]], torch.full((3, 4), 40.0))
    assert not product[[1, 3]].isfinite().any()


def int8_rows(rows: int, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights in int8, and their scales."""
    return torch.randint(-127, 128, (rows, depth), dtype=torch.int8), torch.rand(rows) / depth


linear_sizes = st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9), st.integers(1, 3), st.integers(1, 70))


@needs_native
@pytest.mark.parametrize("isa", cpu.isas())
@given(linear_sizes, st.integers(1, 110), st.booleans(), st.booleans(), st.booleans())
def test_every_instruction_set_merges_tokens_in_a_linear_layer(isa, sizes, columns, norms, has_bias, is_int8):
    B, rows, width, merge, C = sizes
    x, depth = torch.randn(B, merge * rows, merge * width, C), merge * merge * C
    weight, scale = int8_rows(columns, depth) if is_int8 else (torch.randn(columns, depth), None)
    norm_weight, bias = torch.rand(depth) + 0.5 if norms else None, torch.randn(columns) if has_bias else None
    with mock.patch.object(cpu, "_isa", cpu.isas()[isa]):
        actual = linear(x, weight, norm_weight, bias, scale, merge=merge, eps=1e-4)
    lines = merged(x, merge)
    factor = (lines.double().square().mean(1, keepdim=True) + 1e-4).rsqrt() if norms else 1
    if norms:
        lines = lines * norm_weight
    product = int8_product(lines, weight, scale) if is_int8 else lines.double() @ weight.double().t()
    expected = (product.double() * factor + (bias if has_bias else 0)).reshape(actual.shape)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-4 if not is_int8 else 1e-6)


stem_sizes = st.tuples(*(st.integers(1, most) for most in (2, 4, 11, 40, 70)), st.integers(1, 40), st.integers(1, 40))


def stem_inputs(sizes: tuple[int, ...]) -> list[torch.Tensor]:
    """Images, and weights of a stem."""
    B, channels, hidden, dim, _, height, width = sizes
    shapes = [(B, channels, height, width), (hidden, channels, 3, 3), (hidden,), (dim, hidden, 3, 3), (dim,), (dim,)]
    images, weight1, bias1, weight2, bias2, norm_weight = (torch.randn(shape) for shape in shapes)
    return [images, weight1 / (3 * channels**0.5), bias1, weight2 / (3 * hidden**0.5), bias2, norm_weight]


@needs_native
@pytest.mark.parametrize("isa", cpu.isas())
@given(stem_sizes, st.sampled_from([(1, 1), (2, 1), (2, 2), (1, 2)]), st.integers(1, 3), st.integers(0, 2**31))
def test_every_instruction_set_computes_a_stem(isa, sizes, strides, threads, seed):
    torch.manual_seed(seed)
    given, before = stem_inputs(sizes), torch.get_num_threads()
    torch.set_num_threads(threads)
    with mock.patch.object(cpu, "_isa", cpu.isas()[isa]):
        actual = stem(*given, strides=strides, eps=1e-2)
        number, scale = int8_rows(len(given[3]), given[3][0].numel())
        in_int8 = given[:3] + [number.reshape(given[3].shape), *given[4:], scale]
        actual_int8 = stem(*in_int8, strides=strides, eps=1e6)  # the norm multiplies by about 1e-3
    torch.set_num_threads(before)
    images, weight1, bias1, weight2, bias2, norm_weight = (t.double() for t in given)
    y = F.conv2d(F.silu(F.conv2d(images, weight1, bias1, strides[0], 1)), weight2, bias2, strides[1], 1)
    expected = F.rms_norm(y.permute(0, 2, 3, 1), norm_weight.shape, norm_weight, 1e-2)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-4)
    expected, byte = int8_stem(*in_int8, strides, 1e6)
    error, rounding = (actual_int8 - expected).abs(), 1e-8 + 1e-5 * expected.abs() + 1e-3 * byte
    assert (error <= 2 * byte + rounding).all()  # where a sum lies between two bytes
    assert (error <= rounding).double().mean() > 0.9 or expected[
        0, ..., 0
    ].numel() < 200  # such a byte changes 9 tokens
