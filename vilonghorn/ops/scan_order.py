"""Order of the scan: class tokens evenly among the patches of a grid. One class token is in the middle, as in Vim."""

import torch
from timm.layers import register_notrace_function
from torch import Tensor


def insert_class_tokens(patches: Tensor, class_tokens: Tensor, num_class_tokens: int = 1) -> Tensor:
    """Inserts P class tokens between equal runs of the M patches: token i before patch M * (i + 1) // (P + 1).

    Args:
        patches: (B, M, C).
        class_tokens: (B or 1, P, C).
        num_class_tokens: P, at least 0.

    Returns:
        (B, M + P, C), the order of the scan.
    """
    class_tokens = class_tokens.expand(patches.shape[0], -1, -1)
    parts: list[Tensor] = []
    start = 0
    for i in range(num_class_tokens):
        end = patches.shape[1] * (i + 1) // (num_class_tokens + 1)
        parts += [patches[:, start:end], class_tokens[:, i : i + 1]]
        start = end
    return torch.cat(parts + [patches[:, start:]], dim=1)


def prefix_first(x: Tensor, num_class_tokens: int = 1) -> Tensor:
    """Inverse of `insert_class_tokens`: (B, P + M, C) in scan order to class tokens first, then patches."""
    tokens, patches = _parts(x, num_class_tokens)
    return torch.cat(tokens + patches, dim=1)


def split_class_tokens(x: Tensor, num_class_tokens: int = 1) -> tuple[Tensor, Tensor]:
    """The class tokens (B, P, C) and the patches (B, M, C), each contiguous, of x (B, P + M, C) in scan order."""
    tokens, patches = _parts(x, num_class_tokens)
    return torch.cat(tokens + [x[:, :0]], dim=1), torch.cat(patches, dim=1)


def _parts(x: Tensor, num_class_tokens: int) -> tuple[list[Tensor], list[Tensor]]:
    """The class tokens, and the runs of patches between them."""
    tokens: list[Tensor] = []
    patches: list[Tensor] = []
    start = 0
    for i in range(num_class_tokens):
        end = (x.shape[1] - num_class_tokens) * (i + 1) // (num_class_tokens + 1) + i
        tokens += [x[:, end : end + 1]]
        patches += [x[:, start:end]]
        start = end + 1
    return tokens, patches + [x[:, start:]]


@register_notrace_function
def as_list(grid: tuple[int, int]) -> list[int]:
    """Rows and columns as operators take them: torch.jit.trace makes tensors of sizes."""
    rows, columns = grid
    return [int(rows), int(columns)] if torch.jit.is_tracing() else [rows, columns]
