"""The residual block: norm, mixer, stochastic depth, and a residual stream that stays in float32.

What the mixer does inside is its own affair; the embedding and the final norm belong to the model.
"""

from typing import Any, Callable

import torch
from timm.layers import DropPath
from torch import Tensor, fx, nn

from .mixer import Mixer, is_plain
from .norm import RMSNorm


class Block(nn.Module):
    """x + drop_path(mixer(norm(x))).

    Vim (arXiv 2401.09417) carries a branch and its residual apart and adds them at the start of the next block: the
    same sums in the same order. Its drop-path rate of block i then acts on the branch of block i - 1, so that the
    rates, counted by branch, are the usual linear ones.
    """

    def __init__(
        self,
        dim: int,
        *,
        drop_path: float = 0.0,
        norm_layer: Callable[..., nn.Module] = RMSNorm,
        device=None,
        dtype=None,
        **mixer: Any,
    ) -> None:
        """
        Args:
            dim: width of the tokens.
            drop_path: probability that a sample skips the branch in training.
            norm_layer: makes the norm from `dim`.
            device: of the parameters.
            dtype: of the parameters.
            mixer: further arguments of `Mixer`.
        """
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        self.norm = norm_layer(dim, **dd)
        self.mixer = Mixer(dim, **mixer, **dd)
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """
        Args:
            x: residual stream, (B, L, dim), float32 even where the parameters are of a shorter type.

        Returns:
            The stream with the branch added, same shape and type.
        """
        tokens = x.to(self.mixer.D.dtype)
        if torch.jit.is_scripting():
            branch = self.mixer(self.norm(tokens))
        elif isinstance(x, fx.Proxy) or not self._is_plain():  # a traced graph names the norm
            branch = self.mixer(self.norm(tokens))
        else:
            if tokens is x and self._keeps_branch():  # then the mixer adds the stream itself
                return self.mixer(tokens, self.norm.weight, self.norm.eps, True)
            branch = self.mixer(tokens, self.norm.weight, self.norm.eps)
        return x + self.drop_path(branch)

    @torch.jit.unused
    def _is_plain(self) -> bool:
        """Whether the mixer may norm its tokens itself."""
        return is_plain(self.norm, RMSNorm) and is_plain(self.mixer, Mixer) and not self.norm.portable

    @torch.jit.unused
    def _keeps_branch(self) -> bool:
        """Whether stochastic depth leaves the branch as it is."""
        return is_plain(self.drop_path, nn.Identity) or (
            is_plain(self.drop_path, DropPath) and not self.drop_path.training
        )
