"""Products of tokens and weights, which on x86 processors the tiles of `kernels/matmul_cpu.cpp` do faster than the BLAS behind
torch's own. Only float32 is taken from torch. No autograd: see `project`."""

from __future__ import annotations

import platform
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .backends import cpu as native
from .register import shortcut

X86 = platform.machine().lower() in ("x86_64", "amd64")


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x weight^T, for kernels: without autograd, and out of sight of torch's tools.

    Args:
        x: (..., K), any strides.
        weight: (N, K), of x's dtype, any strides.

    Returns:
        (..., N).
    """
    return tiled(_multiply, x, weight) if is_for_tiles(x, weight) else F.linear(x, weight)


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """The gradient (N, K) of `product`'s weight, from that of its result (..., N) and x (..., K)."""
    dy, x = dy.flatten(0, -2).t(), x.flatten(0, -2)
    return _multiply(dy, x) if is_for_tiles(dy, x.t()) else dy @ x


def has_tiles() -> bool:
    """Whether the tiles are there, on a processor where they are faster."""
    return X86 and native.library is not None


def is_for_tiles(x: Tensor, weight: Tensor) -> bool:
    """Whether the tiles can make x weight^T."""
    return (
        has_tiles()
        and x.device.type == weight.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and x.dim() > 1
        and weight.dim() == 2
        and x.shape[-1] == weight.shape[-1]
        and x.numel() * weight.numel() > 0
    )


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    return native.matmul(a if 1 in a.stride() else a.contiguous(), b if 1 in b.stride() else b.contiguous())


torch.library.define("vilonghorn::matmul", "(Tensor a, Tensor b) -> Tensor")
torch.library.impl("vilonghorn::matmul", "CPU")(_multiply)


@torch.library.register_fake("vilonghorn::matmul")
def _(a, b):
    return a.new_empty(a.shape[0], b.shape[1])


matmul = shortcut(torch.ops.vilonghorn.matmul.default, _multiply)  # the same, where torch's tools see it


def tiled(multiply: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor) -> Tensor:
    """x weight^T by a product of matrices."""
    y = multiply(x.flatten(0, -2), weight.t())
    return torch.ops.aten._unsafe_view.default(
        y, (*x.shape[:-1], weight.shape[0])
    )  # autograd lets no other view be changed
