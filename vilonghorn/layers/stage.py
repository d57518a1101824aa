"""Parts of a hierarchy: the stem, merging of tokens, and a stage of blocks on one grid."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ..ops._torch import autocast_dtype
from ..ops.scan_order import as_list
from .block import Block, Blocks
from .norm import to_fp32

fx.wrap("as_list")
fx.wrap("to_stream")


class ConvStem(nn.Module):
    """Two 3x3 convolutions with a SiLU between them, then the norm that `norm_layer` makes: images to a map of tokens.

    `stride`, 1, 2 or 4, is in pixels, from a token to the next. Another one is a ValueError.
    """

    def __init__(
        self, in_chans: int, dim: int, stride: int, norm_layer: Callable[..., nn.Module], device=None, dtype=None
    ) -> None:
        super().__init__()
        if stride not in (1, 2, 4):
            raise ValueError(f"stem_stride is {stride}, expected 1, 2 or 4")
        dd = {"device": device, "dtype": dtype}
        self.conv1 = nn.Conv2d(in_chans, max(1, dim // 2), 3, 2 if stride > 1 else 1, 1, **dd)
        self.conv2 = nn.Conv2d(max(1, dim // 2), dim, 3, 2 if stride > 2 else 1, 1, **dd)
        self.norm = norm_layer(dim, **dd)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, in_chans, H, W) images to (B, H / stride, W / stride, dim). `mask`, (B, 1, h, w): 0 where padding is."""
        x = x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)  # channels last: convolutions take half of the time
        x = F.silu(self.conv1(masked(x, mask)))
        return self.norm(self.conv2(masked(x, mask)).permute(0, 2, 3, 1))


class Stage(nn.Module):
    """Perhaps 2x2 patches merged into one by `downsample`, then blocks on that grid.

    The residual stream is float32 with `residual_in_fp32`, else of the dtype of autocast.
    """

    def __init__(self, downsample: nn.Module, blocks: Sequence[Block], residual_in_fp32: bool = True) -> None:
        super().__init__()
        self.downsample = downsample
        self.residual_in_fp32 = residual_in_fp32
        self.blocks = Blocks(*blocks)
        self.grad_checkpointing = False

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Tokens (B, H, W, C) to the residual stream, (B, H / 2, W / 2, C'), of the first stage (B, H, W, C).

        `mask`, (B, 1, h, w), is 0 where padding is, at the stride of the last stage.
        """
        x = to_stream(self.downsample(x), self.residual_in_fp32)
        H, W = x.shape[1:3]
        if mask is not None:
            mask = F.interpolate(mask, [H, W]).flatten(1)
        return self.blocks(x.flatten(1, 2), as_list((H, W)), self.grad_checkpointing, mask).unflatten(1, [H, W])


class Downsample(nn.Module):
    """Merges 2x2 tokens into one: a norm over their channels, then a linear layer (Swin, arXiv 2103.14030)."""

    def __init__(self, dim: int, out_dim: int, norm_layer: Callable[..., nn.Module], device=None, dtype=None) -> None:
        super().__init__()
        self.norm = norm_layer(4 * dim, device=device, dtype=dtype)
        self.reduction = nn.Linear(4 * dim, out_dim, bias=False, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(B, H, W, dim), H and W even, to (B, H / 2, W / 2, out_dim), in the dtype of the parameters."""
        x = x.to(self.norm.weight.dtype) if hasattr(self.norm, "weight") else x  # type: ignore[arg-type]
        x = x.unflatten(1, [-1, 2]).unflatten(3, [-1, 2])
        return self.reduction(self.norm(x.transpose(2, 3).flatten(3)))


def masked(x: Tensor, mask: Tensor | None) -> Tensor:
    """(B, C, H, W) maps times a mask of 0 and 1, (B, 1, h, w), where H and W are multiples of h and w."""
    return x if mask is None else x * F.interpolate(mask, x.shape[2:]).to(x.dtype)


def to_stream(x: Tensor, residual_in_fp32: bool) -> Tensor:
    """Tokens in float32, or in the dtype of autocast where that is on."""
    if residual_in_fp32 or torch.jit.is_scripting():
        return to_fp32(x)
    return x.to(autocast_dtype(x) or x.dtype)
