"""Patch embedding: timm's `PatchEmbed` with a stride, so that patches may overlap."""

from numbers import Integral
from typing import Any

import timm.layers
import torch
import torch.nn.functional as F
from timm.layers import _assert, to_2tuple
from torch import Tensor, fx


class PatchEmbed(timm.layers.PatchEmbed):
    """Image to tokens by one convolution. Sizes are numbers of pixels, or heights and widths.

    `stride`, from a patch to the next, is at most the patch size, which is its default: no overlap. Images of another
    size than `img_size` are an error, unless `strict_img_size` is False. With `dynamic_img_pad` they are padded at the
    bottom and at the right to a whole number of patches. Else ValueError is raised for a part of one.
    """

    stride: tuple[int, int]

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        stride: int | tuple[int, int] | None = None,
        in_chans: int = 3,
        embed_dim: int = 192,
        strict_img_size: bool = True,
        dynamic_img_pad: bool = False,
        device=None,
        dtype=None,
    ) -> None:
        image, patch = as_size("img_size", img_size), as_size("patch_size", patch_size)
        steps = patch if stride is None else as_size("stride", stride)
        check_sizes(image, patch, steps, dynamic_img_pad)
        options: dict[str, Any] = dict(strict_img_size=strict_img_size, dynamic_img_pad=dynamic_img_pad)
        options |= dict(patch_size=patch, in_chans=in_chans, embed_dim=embed_dim)
        super().__init__(None, **options, device=device, dtype=dtype)
        self.stride = self.proj.stride = steps
        self.img_size, self.grid_size, self.num_patches = self._init_img_size(image)

    def _init_img_size(self, img_size: tuple[int, int] | None):
        if img_size is None:
            return None, None, None
        rows, columns = self.dynamic_feat_size(img_size)
        return img_size, (rows, columns), rows * columns

    def set_input_size(
        self, img_size: int | tuple[int, int] | None = None, patch_size: int | tuple[int, int] | None = None
    ) -> None:
        """Changes image and patch size, in pixels (None: not); raises ValueError if they do not fit each other.

        Filters are resampled. A stride other than the patch size is kept.
        """
        image = self.img_size if img_size is None else as_size("img_size", img_size)
        patch = self.patch_size if patch_size is None else as_size("patch_size", patch_size)
        stride = patch if self.stride == self.patch_size else self.stride
        check_sizes(image, patch, stride, self.dynamic_img_pad)
        self.stride = stride
        if patch != self.patch_size:
            super().set_input_size(patch_size=patch)
            self.proj.stride = stride
        self.img_size, self.grid_size, self.num_patches = self._init_img_size(image)

    def feat_ratio(self, as_scalar: bool = True) -> tuple[int, int] | int:
        """Stride of the token grid, in pixels."""
        return max(self.stride) if as_scalar else self.stride

    def dynamic_feat_size(self, img_size: tuple[int, int]) -> tuple[int, int]:
        """Height and width of the token grid for an image size, padding included."""
        H, W = img_size
        if self.dynamic_img_pad:
            pad_h, pad_w = padding(img_size, self.patch_size, self.stride)
            H, W = H + pad_h, W + pad_w
        return (H - self.patch_size[0]) // self.stride[0] + 1, (W - self.patch_size[1]) // self.stride[1] + 1

    def forward(self, x: Tensor, masked: Tensor | None = None) -> Tensor:
        """(B, in_chans, H, W) images, zeroed where only `masked` patches, (B, h, w), are, to (B, M, embed_dim) tokens.

        Raises AssertionError for another size than the model's, unless `strict_img_size` is False; then ValueError for
        one that is not a whole number of patches.
        """
        _, _, H, W = x.shape
        if self.strict_img_size:
            _assert(H == self.img_size[0], f"Input height ({H}) doesn't match model ({self.img_size[0]}).")
            _assert(W == self.img_size[1], f"Input width ({W}) doesn't match model ({self.img_size[1]}).")
        if self.dynamic_img_pad:
            pad_h, pad_w = padding((H, W), self.patch_size, self.stride)
            x = F.pad(x, (0, pad_w, 0, pad_h))
        elif not self.strict_img_size:
            check_whole_patches((H, W), self.patch_size, self.stride)
        if masked is not None:  # else NaN under a mask reaches the gradient of the filters
            read = masked.logical_not().unsqueeze(1).float()
            patch = read.new_ones([1, 1, self.patch_size[0], self.patch_size[1]])
            x = torch.where(F.conv_transpose2d(read, patch, stride=self.stride) == 0, 0.0, x)
        return self.norm(self.proj(x).flatten(2).transpose(1, 2))


def patch_mask(masked: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Checks which patches are masked, (B, h, w) = shape or (B, h * w), and returns it as booleans, (B, h, w)."""
    B, h, w = shape
    if masked.shape != shape and masked.shape != (B, h * w):
        expected = f"expected (B, h, w) = {list(shape)} or (B, h * w) = {[B, h * w]}: one value a patch"
        raise ValueError(f"masked has shape {list(masked.shape)}, {expected}")
    return masked.reshape(B, h, w).to(torch.bool)


def replace_masked(x: Tensor, masked: Tensor, mask_token: Tensor | None) -> Tensor:
    """Replaces the tokens of x, (..., C), where masked, (...), is True. Raises ValueError if there is no mask token."""
    if mask_token is None:
        raise ValueError("the model has no mask token for masked patches: make the model with mask_token=True")
    return torch.where(masked.unsqueeze(-1), mask_token.to(x.dtype), x)


def as_size(name: str, size: Any) -> tuple[int, int]:
    """Height and width, of two integers or of one for both. Raises ValueError for another `size`."""
    sides = to_2tuple(size)
    if torch.jit.is_tracing() or any(isinstance(side, torch.SymInt) for side in sides):
        return sides  # int() would make them constants of the graph
    are_integers = all(isinstance(side, Integral) and not isinstance(side, bool) for side in sides)
    if len(sides) != 2 or not are_integers or min(sides) <= 0:
        raise ValueError(f"{name} is {size!r}, expected one or two positive integers")
    return int(sides[0]), int(sides[1])


def check_sizes(img_size: tuple[int, int], patch_size: tuple[int, int], stride: tuple[int, int], pad: bool) -> None:
    """Raises ValueError if a model cannot have these sizes."""
    if any(s > p for s, p in zip(stride, patch_size)):
        raise ValueError(f"stride is {stride}, expected 1 to the patch size {patch_size}")
    if not pad:
        check_whole_patches(img_size, patch_size, stride)


@fx.wrap
def check_whole_patches(size: tuple[int, int], patch_size: tuple[int, int], stride: tuple[int, int]) -> None:
    """Raises ValueError if an image is not a whole number of patches."""
    over_h, over_w = size[0] - patch_size[0], size[1] - patch_size[1]
    if over_h < 0 or over_w < 0 or over_h % stride[0] != 0 or over_w % stride[1] != 0:
        raise ValueError(
            f"image of {size[0]}x{size[1]} is not a whole number of {patch_size[0]}x{patch_size[1]} patches at "
            f"stride {stride[0]}x{stride[1]}; resize it, or give dynamic_img_pad=True to the model"
        )


@fx.wrap
def padding(size: tuple[int, int], patch_size: tuple[int, int], stride: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns to add so that the image is a whole number of patches."""
    short_h, short_w = patch_size[0] - size[0], patch_size[1] - size[1]
    return short_h if short_h > 0 else short_h % stride[0], short_w if short_w > 0 else short_w % stride[1]
