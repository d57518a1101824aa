"""The residual block: norm, mixer, perhaps norm and MLP, stochastic depth, and a residual stream in float32."""

from collections.abc import Callable
from typing import Any, cast

import torch
from timm.layers import DropPath, GluMlp, SwiGLUPacked
from timm.models import checkpoint
from torch import Tensor, nn

from ..ops._torch import has_global_hooks, is_batched
from ..ops.block import are_float32_on_cpu, block, prefers_block
from ..ops.blocks import BlockForm, blocks
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
        mixed: Tensor | None = None
        if not torch.jit.is_scripting():
            mixed = self._mix_fused(x, grid)
        if mixed is None:
            normed = self.norm(x.to(self.mixer.D.dtype))
            mixed = x + self.drop_path(self.mixer(normed) if grid is None else self.mixer(normed, grid))
        if self.mlp is None or self.norm2 is None:
            return mixed
        return mixed + self.drop_path(self.mlp(self.norm2(mixed.to(self.mixer.D.dtype))))

    @torch.jit.unused
    def _mix_fused(self, x: Tensor, grid: list[int] | None) -> Tensor | None:
        """Norm and mixer by one operator; None where `fused_weights` returns None."""
        weights = self.fused_weights(x)
        if weights is None:
            return None
        mixer, drops = self.mixer, self._drops()
        form = dict(rule=mixer.rule, reverse=mixer.reverse, eps=self.norm.eps, grid=grid)
        return None if drops else block(x, *weights, **form)  # type: ignore[arg-type]

    @torch.jit.unused
    def inference_form(self, x: Tensor) -> BlockForm | None:
        """The block as `vilonghorn.ops.blocks` takes it, or None where that operator does not run."""
        weights = None if self._drops() or not is_plain(self, Block) else self.fused_weights(x)
        has_mlp = self.mlp is not None and self.norm2 is not None
        mlp_weights = self._fused_mlp_weights(x) if has_mlp else (None, None, None)
        if weights is None or mlp_weights is None:
            return None
        eps = self.norm2.eps if has_mlp else 0.0  # type: ignore[union-attr]
        return BlockForm(weights, mlp_weights, self.mixer.rule, self.mixer.reverse, self.norm.eps, eps)  # type: ignore

    @torch.jit.unused
    def fused_weights(self, x: Tensor) -> tuple[Tensor | None, ...] | None:
        """The weights of norm and mixer as `vilonghorn.ops.block` takes them, or None where that operator does not run.

        It runs eager or in `native_export`, in float32 on a CPU, if each submodule is as it was made.
        """
        norm, mixer = cast(Any, self.norm), self.mixer
        if (is_tracing(x) or has_global_hooks()) and not native_export.is_on:
            return None
        is_as_made = (
            prefers_block(x)
            and is_plain(norm, RMSNorm)
            and is_plain(mixer, Mixer)
            and mixer.has_plain_projections()
            and self._has_plain_drop_path()
            and mixer.scan_norm is None
            and (mixer.conv_weight.dim() == 3 or not native_export.is_on)
            and not mixer.exportable
        )
        if not is_as_made:
            return None
        weights = (norm.weight, mixer.in_proj.weight, *mixer.inner_weights(), mixer.out_proj.weight)
        return weights if are_float32_on_cpu(weights) else None

    @torch.jit.unused
    def _fused_mlp_weights(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """The weights of norm and MLP as `vilonghorn.ops.gated_mlp` takes them, or None where that does not run.

        It runs eager, and for the rest as in `fused_weights`.
        """
        norm, mlp = cast(Any, self.norm2), cast(Any, self.mlp)
        if is_tracing(x) or has_global_hooks():
            return None
        if not (prefers_block(x) and is_plain(norm, RMSNorm) and is_plain(mlp, GluMlp) and not mlp.gate_last):
            return None
        fc1, fc2 = mlp.fc1, mlp.fc2
        parts = ((fc1, nn.Linear), (fc2, nn.Linear), (mlp.act, nn.SiLU), (mlp.norm, nn.Identity))
        is_as_made = (
            all(is_plain(part, kind) for part, kind in parts)
            and all(is_plain(drop, nn.Dropout) and drop.p == 0 for drop in (mlp.drop1, mlp.drop2))
            and self._has_plain_drop_path()
            and fc1.bias is None
            and fc2.bias is None
            and not norm.exportable
        )
        weights = (norm.weight, fc1.weight, fc2.weight)
        return weights if is_as_made and are_float32_on_cpu(weights) else None

    def _has_plain_drop_path(self) -> bool:
        return is_plain(self.drop_path, DropPath) or is_plain(self.drop_path, nn.Identity)

    def _drops(self) -> bool:
        return self.drop_path.training and isinstance(self.drop_path, DropPath)


class Blocks(nn.Sequential):
    """Blocks in sequence, on one grid."""

    def forward(self, x: Tensor, grid: list[int] | None = None, checkpointing: bool = False) -> Tensor:
        """Takes and returns what `Block` does; with `checkpointing` keeps only the input of each block for backward."""
        if not torch.jit.is_scripting():
            y = self._at_once(x, grid)
            if y is not None:
                return y
        for module in self:
            if checkpointing and not torch.jit.is_scripting():
                x = checkpoint(module, x, grid)
            else:
                x = module(x, grid)
        return x

    @torch.jit.unused
    def _at_once(self, x: Tensor, grid: list[int] | None) -> Tensor | None:
        """All blocks by one operator, in inference where each of them is fused; else None."""
        if torch.is_grad_enabled() or is_tracing(x) or native_export.is_on or is_batched(x):
            return None
        forms = []
        for module in self:
            form = module.inference_form(x) if isinstance(module, Block) else None
            if form is None or any(w is not None and is_batched(w) for w in (*form.weights, *form.mlp_weights)):
                return None
            forms.append(form)
        return blocks(x, forms, grid=grid) if forms else None
