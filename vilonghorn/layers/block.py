"""The residual block: norm, mixer, perhaps norm and MLP, stochastic depth, and a residual stream in float32."""

from collections.abc import Callable
from typing import Any, cast

import torch
from timm.layers import DropPath, GluMlp, SwiGLUPacked
from timm.models import checkpoint
from torch import Tensor, nn

from ..ops._torch import has_global_hooks
from ..ops.block import block, prefers_block
from ..ops.gated_mlp import gated_mlp
from ..ops.register import is_tracing, native_export
from .mixer import Mixer, is_plain
from .norm import RMSNorm


class Block(nn.Module):
    """x + drop_path(mixer(norm(x))), and with an MLP then x + drop_path(mlp(norm2(x))).

    Vim (arXiv 2401.09417) adds a branch to its residual at the start of the next block: the same sums, in the same
    order. Its drop-path rate of block i acts on the branch of block i - 1, so that the rates of the branches are the
    usual linear ones.
    """

    def __init__(
        self,
        dim: int,
        *,
        drop_path: float = 0.0,
        mlp_ratio: float = 0.0,
        norm_layer: Callable[..., nn.Module] = RMSNorm,
        device=None,
        dtype=None,
        **mixer: Any,
    ) -> None:
        """
        Args:
            dim: width of the tokens.
            drop_path: probability that a sample skips a branch in training.
            mlp_ratio: hidden width of a gated MLP (SwiGLU, arXiv 2002.05202), in units of dim. Default: no MLP.
            norm_layer: makes the norm from `dim`.
            device: of the parameters.
            dtype: of the parameters.
            mixer: further arguments of `Mixer`.

        Raises:
            ValueError: a negative `mlp_ratio`.
        """
        super().__init__()
        if mlp_ratio < 0:
            raise ValueError(f"mlp_ratio is {mlp_ratio}, expected a width in units of dim, or 0 for no MLP")
        dd = {"device": device, "dtype": dtype}
        self.norm = norm_layer(dim, **dd)
        self.mixer = Mixer(dim, **mixer, **dd)
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()
        self.norm2: nn.Module | None = None
        self.mlp: nn.Module | None = None
        if mlp_ratio > 0:
            self.norm2 = norm_layer(dim, **dd)
            self.mlp = SwiGLUPacked(dim, 2 * max(1, round(mlp_ratio * dim)), bias=False, **dd)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialises the MLP's output as the mixer's."""
        if self.mlp is not None:
            bound = (self.mlp.fc2.in_features * self.mixer.depth) ** -0.5  # type: ignore[union-attr, operator]
            nn.init.uniform_(self.mlp.fc2.weight, -bound, bound)  # type: ignore[union-attr, arg-type]

    def forward(self, x: Tensor, grid: list[int] | None = None) -> Tensor:
        """
        Args:
            x: residual stream, (B, L, dim), float32 even where the parameters have a shorter dtype.
            grid: of the mixer, if it needs one.

        Returns:
            The stream with the branches added, same shape and dtype.
        """
        dtype = self.mixer.D.dtype
        if not torch.jit.is_scripting() and self.is_fused(x):
            x = self._forward_fused(x, grid)
        else:
            normed = self.norm(x.to(dtype))
            x = x + self.drop_path(self.mixer(normed) if grid is None else self.mixer(normed, grid))
        if self.mlp is not None and self.norm2 is not None:
            if not torch.jit.is_scripting() and self.is_mlp_fused(x):
                x = self._mlp_fused(x)
            else:
                x = x + self.drop_path(self.mlp(self.norm2(x.to(dtype))))
        return x

    @torch.jit.unused
    def is_fused(self, x: Tensor) -> bool:
        """Whether one operator runs norm and mixer: eager or in `native_export`, float32 on a CPU, and each submodule
        as it was made.
        """
        norm: Any = self.norm
        mixer = self.mixer
        if (is_tracing(x) or has_global_hooks()) and not native_export.is_on:
            return False
        if not (is_plain(norm, RMSNorm) and is_plain(mixer, Mixer)):
            return False
        return (
            mixer.has_plain_projections()
            and self._has_plain_drop_path()
            and mixer.scan_norm is None
            and (mixer.conv_weight.dim() == 3 or not native_export.is_on)
            and not mixer.exportable
            and prefers_block(
                [x, norm.weight, mixer.in_proj.weight, mixer.out_proj.weight, *mixer._parameters.values()]
            )
        )

    @torch.jit.unused
    def _forward_fused(self, x: Tensor, grid: list[int] | None) -> Tensor:
        norm: Any = self.norm
        mixer = self.mixer
        drops = self._drops()
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
            grid=grid,
        )
        return x + self.drop_path(y) if drops else y

    @torch.jit.unused
    def is_mlp_fused(self, x: Tensor) -> bool:
        """Whether one operator runs norm and MLP: eager, and for the rest as `is_fused`."""
        norm, mlp = cast(Any, self.norm2), cast(Any, self.mlp)
        if is_tracing(x) or has_global_hooks():
            return False
        if not (is_plain(norm, RMSNorm) and is_plain(mlp, GluMlp) and not mlp.gate_last):
            return False
        parts = [(mlp.fc1, nn.Linear), (mlp.fc2, nn.Linear), (mlp.act, nn.SiLU), (mlp.norm, nn.Identity)]
        return (
            all(is_plain(part, kind) for part, kind in parts)
            and all(is_plain(drop, nn.Dropout) and drop.p == 0 for drop in (mlp.drop1, mlp.drop2))
            and self._has_plain_drop_path()
            and mlp.fc1.bias is None
            and mlp.fc2.bias is None
            and not norm.exportable
            and prefers_block([x, norm.weight, mlp.fc1.weight, mlp.fc2.weight])
        )

    @torch.jit.unused
    def _mlp_fused(self, x: Tensor) -> Tensor:
        norm, mlp, drops = cast(Any, self.norm2), cast(Any, self.mlp), self._drops()
        y = gated_mlp(x, norm.weight, mlp.fc1.weight, mlp.fc2.weight, eps=norm.eps, residual=not drops)
        return x + self.drop_path(y) if drops else y

    def _has_plain_drop_path(self) -> bool:
        return is_plain(self.drop_path, DropPath) or is_plain(self.drop_path, nn.Identity)

    def _drops(self) -> bool:
        return self.drop_path.training and isinstance(self.drop_path, DropPath)


class Blocks(nn.Sequential):
    """Blocks in sequence, on one grid."""

    def forward(self, x: Tensor, grid: list[int] | None = None, checkpointing: bool = False) -> Tensor:
        """Takes and returns what `Block` does; with `checkpointing` keeps only the input of each block for backward."""
        for module in self:
            if checkpointing and not torch.jit.is_scripting():
                x = checkpoint(module, x, grid)
            else:
                x = module(x, grid)
        return x
