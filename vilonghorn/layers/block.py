"""The residual block: norm, mixer, perhaps norm and MLP, stochastic depth, and a residual stream of its own dtype."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import DropPath, SwiGLUPacked
from timm.models import checkpoint
from torch import Tensor, nn

from ..ops._torch import is_unchanged
from . import fast_block
from .mixer import Mixer, State
from .norm import RMSNorm, residual_norm
from .short_linear import short_dtype, short_linear, short_weights


class Block(nn.Module):
    """x + drop_path(mixer(norm(x))), and with an MLP then x + drop_path(mlp(norm2(x))).

    Vim's code (arXiv 2401.09417) adds the branch of block i - 1 at the start of block i, and shifts its drop rates by
    one block to match. The sums are those of this class.
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
            mlp_ratio: hidden width of a gated MLP (SwiGLU, arXiv 2002.05202), in units of dim; its first layer gives
                gates and values. Default: no MLP. A negative one is a ValueError.
            norm_layer: makes the norm from `dim`.
            device: of the parameters.
            dtype: of the parameters.
            mixer: further arguments of `Mixer`.
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
        """Initialises the last layer of the MLP as that of the mixer. The other modules initialise themselves."""
        if self.mlp is not None:
            bound = (self.mlp.fc2.in_features * self.mixer.num_branches) ** -0.5  # type: ignore[union-attr, operator]
            nn.init.uniform_(self.mlp.fc2.weight, -bound, bound)  # type: ignore[union-attr, arg-type]

    def forward(self, x: Tensor, grid: list[int] | None = None, valid: Tensor | None = None) -> Tensor:
        """Adds the branches to the residual stream x, (B, L, dim), float32, or bfloat16 under autocast.

        `grid`: [rows, columns] of the patches, for mixers with a convolution over the grid. `valid`, (B, L), is True
        for the tokens that count (default: all).
        """
        if torch.jit.is_scripting():
            normed = self.norm(x.to(self.norm.weight.dtype) if hasattr(self.norm, "weight") else x)  # type: ignore[arg-type]
            x = x + self.drop_path(self._mix(normed, grid, valid))
            if self.mlp is not None and self.norm2 is not None:
                normed = self.norm2(x.to(self.norm2.weight.dtype) if hasattr(self.norm2, "weight") else x)  # type: ignore
                x = x + self.drop_path(self.mlp(normed))
            return x
        y = fast_block.run(self, x, grid) if valid is None else None  # the same in fewer calls, or None
        if y is None:
            y = self._add_mixed(x, grid, valid)
            y = y if self.mlp is None else self._add_mlp(y)
        return y

    @torch.jit.unused
    def step(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """As `forward` for the next tokens of a sequence, with the state of `Mixer.step`, in torch's own modules."""
        mixed, state = self.mixer.step(self.norm(x.to(self.mixer.conv_bias.dtype)), state)
        x = x + self.drop_path(mixed)
        if self.mlp is not None and self.norm2 is not None:
            x = x + self.drop_path(self.mlp(self.norm2(x.to(self.mixer.conv_bias.dtype))))
        return x, state

    @torch.jit.unused
    def _add_mixed(self, x: Tensor, grid: list[int] | None, valid: Tensor | None) -> Tensor:
        """x plus the branch of the mixer, under autocast by its last product where nothing is between them."""
        x, normed = residual_norm(self.norm, x)
        stream, y = self._stream(x), None
        if stream is not None and valid is None and is_unchanged(self.mixer, Mixer):
            y = self.mixer._run_short(normed, grid, stream)
        return x + self.drop_path(self._mix(normed, grid, valid)) if y is None else y

    @torch.jit.unused
    def _add_mlp(self, x: Tensor) -> Tensor:
        """As `_add_mixed` for the MLP."""
        mlp: Any = self.mlp
        x, normed = residual_norm(self.norm2, x)  # type: ignore[arg-type]
        short = short_weights(normed, (mlp.fc1, mlp.fc2)) if fast_block.is_swiglu(mlp) else None
        if short is None:
            return x + self.drop_path(mlp(normed))
        gates, values = short_linear(normed.to(short[0].dtype), short[0], mlp.fc1.weight).chunk(2, -1)
        stream = self._stream(x)
        y = short_linear(F.silu(gates) * values, short[1], mlp.fc2.weight, stream)
        return x + self.drop_path(y) if stream is None else y

    @torch.jit.unused
    def _stream(self, x: Tensor) -> Tensor | None:
        """x if autocast gives the branches its dtype, and they are added as they are."""
        drop_path = self.drop_path
        is_open = is_unchanged(drop_path, nn.Identity) or is_unchanged(drop_path, DropPath) and not drop_path.training
        dtype = short_dtype(x) if is_open else None
        return x if dtype is not None and x.dtype == dtype else None

    def _mix(self, x: Tensor, grid: list[int] | None, valid: Tensor | None) -> Tensor:
        if valid is not None:
            return self.mixer(x, grid, valid)
        return self.mixer(x) if grid is None else self.mixer(x, grid)  # another mixer may take the tokens only


class Blocks(nn.Sequential):
    """Blocks in sequence, on one grid."""

    def forward(
        self, x: Tensor, grid: list[int] | None = None, valid: Tensor | None = None, checkpointing: bool = False
    ) -> Tensor:
        """Takes and returns what `Block` does; with `checkpointing` keeps only the input of each block for backward."""
        for block in self:
            if checkpointing and not torch.jit.is_scripting():
                x = checkpoint(block, x, grid) if valid is None else checkpoint(block, x, grid, valid)
            else:
                x = block(x, grid) if valid is None else block(x, grid, valid)
        return x
