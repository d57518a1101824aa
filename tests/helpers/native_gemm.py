"""The matrix products of the native library, and what products with int8 weights are."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from vilonghorn.ops.backends import cpu

needs_amx = pytest.mark.skipif(
    not cpu.has_bf16_products(), reason="the processor or the library lacks products of bfloat16 values"
)


@contextmanager
def products(form: str) -> Iterator[None]:
    """With products of torch's precision "high" or "medium", or those under "autocast" to bfloat16."""
    before = torch.get_float32_matmul_precision()
    if form != "autocast":
        torch.set_float32_matmul_precision(form)
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=form == "autocast"):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


class Gemm(ctypes.Structure):
    """VlGemm of kernels/include/vilonghorn.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "columns", "depth")),
        ("threads", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("a", "b")),
        *((name, ctypes.c_int64) for name in ("a_row", "a_depth", "b_depth", "b_column")),
        *((name, ctypes.c_void_p) for name in ("add", "out", "b_scale")),
        ("bf16_parts", ctypes.c_int32),
    ]


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    add: torch.Tensor | None = None,
    bf16_parts: int = 0,
    b_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """The product that the kernel of a block computes, a b + add; int8 columns of b have a scale each."""
    a, b = (t if 1 in t.stride() else t.contiguous() for t in (a, b))
    (rows, depth), columns = a.shape, b.shape[1]
    out = a.new_full((rows, columns), torch.nan)
    # The stride of a single column is arbitrary in torch.
    strides = [stride for t in (a, b) for stride in (t.stride(0), 1 if t.shape[1] == 1 else t.stride(1))]
    factors, others = ([None if t is None else t.data_ptr() for t in ts] for ts in ((a, b), (add, out, b_scale)))
    struct = Gemm(rows, columns, depth, torch.get_num_threads(), *factors, *strides, *others, bf16_parts)
    cpu._check(cpu.library.vl_matmul(ctypes.byref(struct), cpu._isa))
    return out


def int8_product(
    a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor, add: torch.Tensor | None = None
) -> torch.Tensor:
    """a (b scale)^T + add in integers, with int8 rows of b; rows of a in 127 steps of their largest magnitude."""
    largest = a.abs().amax(1, keepdim=True)
    factor = torch.full_like(largest, 127) / largest  # 127 / largest multiplies by a rounded reciprocal
    integers = (a * torch.where(largest > 0, factor, 0)).round().long()
    product = (integers @ b.long().t()).float() * (scale * (largest / 127))
    return product if add is None else product + add
