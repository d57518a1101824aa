"""Order of the scan: patches in raster order, with a class token in their middle, as in Vim."""

from collections.abc import Sequence

import torch
from torch import Tensor


def insert_class_token(patches: Tensor, class_token: Tensor) -> Tensor:
    """Inserts a class token, (B or 1, 1, C), before patch M // 2 of (B, M, C); (B, M + 1, C), the order of the scan."""
    middle = patches.shape[1] // 2
    class_token = class_token.expand(patches.shape[0], -1, -1)
    return torch.cat([patches[:, :middle], class_token, patches[:, middle:]], dim=1)


def class_token_first(x: Tensor) -> Tensor:
    """Inverse of `insert_class_token`: (B, 1 + M, C) in the order of the scan to class token first, then patches."""
    middle = (x.shape[1] - 1) // 2
    return torch.cat([x[:, middle : middle + 1], x[:, :middle], x[:, middle + 1 :]], dim=1)


def flip_reversed(y: Tensor, reverse: Sequence[int]) -> list[Tensor]:
    """The G directions of y, (G, B, L, D), those with reverse[g] flipped along the tokens."""
    directions = y.unbind(0) if len(reverse) > 1 else [y.squeeze(0)]  # in runtimes of ONNX a squeeze is no copy
    return [y_g.flip(1) if flag else y_g for y_g, flag in zip(directions, reverse)]
