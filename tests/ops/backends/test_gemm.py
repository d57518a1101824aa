"""The native matrix product against float64."""

import ctypes
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vilonghorn.ops.backends import cpu as native

needs_native = pytest.mark.skipif(native.library is None, reason="the native library is not built")
layouts = st.tuples(st.booleans(), st.integers(0, 3))


class Gemm(ctypes.Structure):
    """VlGemm of kernels/include/vilonghorn.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "columns", "depth")),
        ("threads", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("a", "b")),
        *((name, ctypes.c_int64) for name in ("a_row", "a_depth", "b_depth", "b_column")),
        *((name, ctypes.c_void_p) for name in ("add", "out")),
    ]


def gemm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product that the kernel of a block computes."""
    a, b = (t if 1 in t.stride() else t.contiguous() for t in (a, b))
    (rows, depth), columns = a.shape, b.shape[1]
    out = a.new_empty(rows, columns)
    # The stride of a single column is arbitrary in torch.
    strides = [stride for t in (a, b) for stride in (t.stride(0), 1 if t.shape[1] == 1 else t.stride(1))]
    pointers = (a.data_ptr(), b.data_ptr())
    native._run(
        native.library.vl_matmul,
        Gemm(rows, columns, depth, torch.get_num_threads(), *pointers, *strides, None, out.data_ptr()),
    )
    return out


def matrix(rows: int, columns: int, layout: tuple[bool, int]) -> torch.Tensor:
    """Part of a wider one, and perhaps transposed."""
    transposed, spare = layout
    wide = torch.randn(columns, rows + spare).t() if transposed else torch.randn(rows, columns + spare)
    return wide[:rows, :columns]


@needs_native
@pytest.mark.parametrize("isa", native.isa_levels())
@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 150), st.integers(1, 110), st.sampled_from([1, 2, 15, 16, 31, 192, 511, 513, 1100]), layouts, layouts
)
def test_every_instruction_set_multiplies(isa, rows, columns, depth, a_layout, b_layout):
    a, b = matrix(rows, depth, a_layout), matrix(depth, columns, b_layout)
    expected = a.double() @ b.double()
    with mock.patch.object(native, "_isa", native.isa_levels()[isa]):
        torch.testing.assert_close(gemm(a, b).double(), expected, rtol=1e-5, atol=1e-4 * depth**0.5)


@needs_native
@settings(max_examples=20, deadline=None)
@given(st.integers(2, 300), st.integers(1, 100), st.integers(1, 600), layouts, st.integers(0, 299))
def test_a_row_depends_on_neither_threads_nor_other_rows(rows, columns, depth, layout, row):
    a, b, before = matrix(rows, depth, layout), torch.randn(depth, columns), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(gemm(a, b))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    row %= rows
    assert torch.equal(gemm(a[row : row + 1].contiguous(), b)[0], results[0][row])
