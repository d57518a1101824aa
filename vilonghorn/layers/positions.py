"""Positions for another grid of patches."""

import torch
from timm.layers import register_notrace_function, resample_abs_pos_embed
from torch import Tensor


@register_notrace_function
def resample_positions(pos: Tensor, new_size: list[int], old_size: list[int]) -> Tensor:
    """Resamples positions, (1, 1 + M, C), a class token first, by antialiased bicubic interpolation, as timm does.

    Sizes are rows and columns of patches. An exported graph has two products of matrices: runtimes of ONNX differ in
    what they support of Resize.
    """
    if not torch.jit.is_scripting():
        if torch.compiler.is_exporting() or torch.jit.is_tracing():
            return _resample_by_products(pos, new_size, old_size)
    return resample_abs_pos_embed(pos, new_size=new_size, old_size=old_size, num_prefix_tokens=1)


@torch.jit.unused
def _resample_by_products(pos: Tensor, new_size: list[int], old_size: list[int]) -> Tensor:
    rows, columns = (_weights(new, old, pos) for new, old in zip(new_size, old_size))
    grid = (rows @ pos[0, 1:].float().reshape(old_size[0], -1)).unflatten(1, (old_size[1], -1))  # (rows, old, C)
    return torch.cat([pos[:, :1], (columns @ grid).flatten(0, 1).unsqueeze(0).to(pos.dtype)], 1)


def _weights(new: int, old: int, like: Tensor) -> Tensor:
    """(new, old): the filter of Keys with a = -1/2 (IEEE Trans. ASSP 29, 1981), wider where the grid shrinks."""
    index = torch.arange(new, device=like.device, dtype=torch.float32)
    scale = old / (index[-1:] + 1)
    distance = torch.arange(old, device=like.device) + 0.5 - (index.unsqueeze(1) + 0.5) * scale
    distance = (distance / scale.clamp(min=1)).abs()
    near, far = distance.clamp(max=1), distance.clamp(1, 2)
    weights = (1.5 * near - 2.5) * near * near + 1 + ((2.5 - 0.5 * far) * far - 4) * far + 2
    return weights / weights.sum(1, keepdim=True)
