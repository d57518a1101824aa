"""The residual block: norm, mixer, stochastic depth, and a residual stream in float32."""

from collections.abc import Callable
from typing import Any

import torch
from timm.layers import DropPath
from torch import Tensor, nn

from ..ops._torch import has_global_hooks
from ..ops.block import block, prefers_block
from ..ops.register import is_native_export, is_tracing
from .mixer import Mixer, is_plain
from .norm import RMSNorm


class Block(nn.Module):
    """x + drop_path(mixer(norm(x))).

    Vim (arXiv 2401.09417) adds a branch to its residual at the start of the next block: the same sums, in the same
    order. Its drop-path rate of block i acts on the branch of block i - 1, so that the rates of the branches are the
    usual linear ones.
    """

    def __init__(
        self,
        dim: int,
        *,
        drop_path: float = 0.0,
        norm_layer: Callable[..., nn.Module] = RMSNorm,
        mixer_layer: Callable[..., Mixer] = Mixer,
        device=None,
        dtype=None,
        **mixer: Any,
    ) -> None:
        """
        Args:
            dim: width of the tokens.
            drop_path: probability that a sample skips the branch in training.
            norm_layer: makes the norm from `dim`.
            mixer_layer: makes the mixer from `dim` and `mixer`.
            device: of the parameters.
            dtype: of the parameters.
            mixer: further arguments of `mixer_layer`.
        """
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        self.norm = norm_layer(dim, **dd)
        self.mixer = mixer_layer(dim, **mixer, **dd)
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """
        Args:
            x: residual stream, (B, L, dim), float32 even where the parameters have a shorter dtype.

        Returns:
            The stream with the branch added, same shape and dtype.
        """
        if not torch.jit.is_scripting() and self.is_fused(x):
            return self._forward_fused(x)
        return x + self.drop_path(self.mixer(self.norm(x.to(self.mixer.D.dtype))))

    @torch.jit.unused
    def is_fused(self, x: Tensor) -> bool:
        """Whether one operator runs the whole block: eager or in `native_export`, float32 on a CPU, and every submodule
        as it was made.
        """
        norm: Any = self.norm
        mixer, drop_path = self.mixer, self.drop_path
        if (is_tracing(x) or has_global_hooks()) and not is_native_export():
            return False
        if not (is_plain(norm, RMSNorm) and is_plain(mixer, Mixer)):
            return False
        return (
            mixer.has_plain_projections()
            and (is_plain(drop_path, DropPath) or is_plain(drop_path, nn.Identity))
            and mixer.scan_norm is None
            and not mixer.exportable
            and prefers_block(
                [x, norm.weight, mixer.in_proj.weight, mixer.out_proj.weight, *mixer._parameters.values()]
            )
        )

    @torch.jit.unused
    def _forward_fused(self, x: Tensor) -> Tensor:
        norm: Any = self.norm
        mixer = self.mixer
        drops = self.drop_path.training and isinstance(self.drop_path, DropPath)
        y = block(
            x,
            norm.weight,
            mixer.in_proj.weight,
            *mixer.inner_weights(),
            mixer.out_proj.weight,
            rule=mixer.rule,
            reverse=mixer.reverse,
            eps=norm.eps,
            residual=not drops,
        )
        return x + self.drop_path(y) if drops else y
