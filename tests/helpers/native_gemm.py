"""The matrix products of the native library, and what products with int8 weights are."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F

from vilonghorn.ops.backends import cpu


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
    product = (integers @ b.long().t()).float() * (scale * (largest * torch.tensor(1 / 127)))
    return product if add is None else product + add


class Linear(ctypes.Structure):
    """VlLinear of kernels/include/vilonghorn.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("batch", "rows", "columns", "out_channels", "channels", "merge")),
        ("threads", ctypes.c_int32),
        ("eps", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("x", "norm_weight", "weight", "bias", "scale", "packed", "out")),
    ]


class Stem(ctypes.Structure):
    """VlStem of kernels/include/vilonghorn.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("batch", "channels", "rows", "columns", "hidden", "dim")),
        *((name, ctypes.c_int64) for name in ("stride1", "stride2")),
        ("threads", ctypes.c_int32),
        ("eps", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("images", "weight1", "bias1", "weight2", "bias2", "norm_weight")),
        *((name, ctypes.c_void_p) for name in ("scale", "packed", "out")),
    ]


def linear(x, weight, norm_weight=None, bias=None, scale=None, *, merge=1, eps=1e-5) -> torch.Tensor:
    """The operator Linear of exported files, for a map x, (B, H, W, C)."""
    B, H, W, C = x.shape
    pointers = [None if t is None else t.data_ptr() for t in (x, norm_weight, weight, bias, scale)]
    out = x.new_full((B, H // merge, W // merge, len(weight)), torch.nan)
    sizes = (*out.shape, C, merge, torch.get_num_threads(), eps)
    cpu._check(cpu.library.vl_linear_forward(ctypes.byref(Linear(*sizes, *pointers, None, out.data_ptr())), cpu._isa))
    return out


def stem(images, weight1, bias1, weight2, bias2, norm_weight, scale=None, *, strides=(2, 2), eps=1e-5) -> torch.Tensor:
    """The operator Stem of exported files."""
    given = (images, weight1, bias1, weight2, bias2, norm_weight, scale)
    pointers = [None if t is None else t.data_ptr() for t in given]
    sides = [((side - 1) // strides[0] + strides[1]) // strides[1] for side in images.shape[2:]]
    out = images.new_full((len(images), *sides, len(weight2)), torch.nan)
    sizes = (*images.shape, len(weight1), len(weight2), *strides, torch.get_num_threads(), eps)
    cpu._check(cpu.library.vl_stem_forward(ctypes.byref(Stem(*sizes, *pointers, None, out.data_ptr())), cpu._isa))
    return out


def merged(x: torch.Tensor, merge: int) -> torch.Tensor:
    """The rows that the operator Linear multiplies: (B * H / merge * W / merge, merge * merge * C)."""
    B, H, W, C = x.shape
    x = x.reshape(B, H // merge, merge, W // merge, merge, C).transpose(2, 3)
    return x.reshape(-1, merge * merge * C)


def int8_stem(images, weight1, bias1, weight2, bias2, norm_weight, scale, strides, eps) -> tuple[torch.Tensor, ...]:
    """The operator StemInt8 in float64 and integers, and what a byte that is rounded otherwise changes at most."""
    double = (t.double() for t in (images, weight1, bias1))
    hidden = F.silu(F.conv2d(*double, stride=strides[0], padding=1))
    B, C, H, W = hidden.shape
    rows, columns = ((side - 1) // strides[1] + 1 for side in (H, W))
    padded = F.pad(hidden, (1, 1, 1, 1))
    number, sums, unit = weight2.long(), torch.empty(B, rows, columns, len(weight2)), torch.empty(B, rows, 1, 1)
    for b in range(B):
        for y in range(rows):
            three = padded[b, :, y * strides[1] : y * strides[1] + 3]  # one scale for three rows
            step = (three.abs().max().item() + 0.2785) / 254
            zero = round(0.2785 / step)
            integers = (three / step).round().long()
            assert (integers + zero).min() >= 0 and (integers + zero).max() <= 255
            patches = integers.unfold(2, 3, strides[1])  # (C, 3, X, 3)
            sums[b, y] = torch.einsum("cixj,ocij->xo", patches, number).double() * step
            unit[b, y] = step
    out = sums * scale.double() + bias2.double()
    norm = norm_weight.double() / (out.square().mean(-1, keepdim=True) + eps).sqrt()
    return out * norm, (unit * 127 * scale.double() * norm).abs()
