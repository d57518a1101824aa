"""Patch embedding."""

from typing import Any

import timm.layers
import torch
import torch.nn.functional as F
from timm.layers import register_notrace_function, to_2tuple
from torch import Tensor, nn


class PatchEmbed(timm.layers.PatchEmbed):
    """Image to tokens by one convolution: timm's `PatchEmbed` with a stride, so that patches may overlap."""

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
        """
        Args:
            img_size: image height and width, in pixels.
            patch_size: patch height and width, in pixels.
            stride: pixels from a patch to the next, at most patch_size. Default: patch_size, no overlap.
            in_chans: image channels.
            embed_dim: width of the tokens.
            strict_img_size: raise an error for images of another size than `img_size`.
            dynamic_img_pad: pad images at the bottom and at the right to a whole number of patches.
            device: of the parameters.
            dtype: of the parameters.

        Raises:
            ValueError: a stride outside 1..patch_size, or an image that is not a whole number of patches.
        """
        sizes = to_2tuple(img_size), to_2tuple(patch_size), to_2tuple(patch_size if stride is None else stride)
        check_sizes(*sizes, dynamic_img_pad)
        options: dict[str, Any] = dict(device=device, dtype=dtype)
        options |= dict(strict_img_size=strict_img_size, dynamic_img_pad=dynamic_img_pad)
        super().__init__(img_size, sizes[1], in_chans, embed_dim, **options)
        self.in_chans = in_chans
        self.backbone: nn.Module = nn.Identity()  # the stem of `StemEmbed`
        self.proj.stride = sizes[2]
        self._set_sizes(*sizes)

    def _set_sizes(self, img_size: tuple[int, int], patch_size: tuple[int, int], stride: tuple[int, int]) -> None:
        self.img_size, self.patch_size, self.stride = img_size, patch_size, stride
        self.grid_size = self.dynamic_feat_size(img_size)
        self.num_patches = self.grid_size[0] * self.grid_size[1]

    def set_input_size(
        self, img_size: int | tuple[int, int] | None = None, patch_size: int | tuple[int, int] | None = None
    ) -> None:
        """Changes image and patch size. Filters are resampled; a stride other than the patch size is kept.

        Args:
            img_size: new height and width; None keeps the present ones.
            patch_size: new patch height and width; None keeps the present ones.

        Raises:
            ValueError: sizes that do not fit each other.
        """
        new_patch = to_2tuple(self.patch_size if patch_size is None else patch_size)
        stride = new_patch if self.stride == self.patch_size else self.stride
        sizes = to_2tuple(self.img_size if img_size is None else img_size), new_patch, stride
        check_sizes(*sizes, self.dynamic_img_pad)
        if new_patch != self.patch_size:
            super().set_input_size(patch_size=new_patch)
            self.proj.stride = stride
        self._set_sizes(*sizes)

    def feat_ratio(self, as_scalar: bool = True) -> tuple[int, int] | int:
        """Stride of the token grid, in pixels."""
        return max(self.stride) if as_scalar else self.stride

    def dynamic_feat_size(self, img_size: tuple[int, int]) -> tuple[int, int]:
        """Height and width of the token grid for an image size, padding included."""
        H, W = img_size
        if self.dynamic_img_pad:
            pad_h, pad_w = self.padding(img_size)
            H, W = H + pad_h, W + pad_w
        return (H - self.patch_size[0]) // self.stride[0] + 1, (W - self.patch_size[1]) // self.stride[1] + 1

    def padding(self, img_size: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of padding for an image size."""
        return padding(img_size, self.patch_size, self.stride)

    def forward(self, x: Tensor) -> Tensor:
        """
        Args:
            x: images, (B, in_chans, H, W).

        Returns:
            Patch tokens in raster order, (B, M, embed_dim).

        Raises:
            ValueError: not a batch of images, another number of channels, or a size that does not fit.
            TypeError: integers, or float64 where the weights are not, or the other way round.
        """
        check_images(x, self.in_chans, self.proj.weight)
        H, W = x.shape[-2:]
        if self.strict_img_size:
            check_same_size((H, W), self.img_size)
        elif not self.dynamic_img_pad:
            check_image_size((H, W), self.patch_size, self.stride)
        if self.dynamic_img_pad:
            pad_h, pad_w = self.padding((H, W))
            x = F.pad(x, (0, pad_w, 0, pad_h))
        return self.norm(self.proj(self.backbone(x)).flatten(2).transpose(1, 2))


def check_sizes(img_size: tuple[int, int], patch_size: tuple[int, int], stride: tuple[int, int], pad: bool) -> None:
    """Raises ValueError if a model cannot have these sizes."""
    if min(patch_size) < 1:
        raise ValueError(f"patch_size is {patch_size}, expected at least one pixel in height and width")
    if not all(1 <= s <= p for s, p in zip(stride, patch_size)):
        raise ValueError(f"stride is {stride}, expected 1 to the patch size {patch_size}")
    if not pad:
        check_image_size(img_size, patch_size, stride)


@register_notrace_function
def check_images(x: Tensor, in_chans: int, weight: Tensor) -> None:
    """Raises ValueError if x is not a batch of images with `in_chans` channels, TypeError if its dtype does not fit."""
    if x.dim() != 4:
        remedy = "; give one image as a batch of one: images[None]" if x.dim() == 3 else ""
        raise ValueError(f"images have shape {list(x.shape)}, expected (batch, channels, height, width){remedy}")
    if x.shape[1] != in_chans:
        remedy = f"give in_chans={x.shape[1]} to the model, or convert the images"
        if x.shape[3] == in_chans:
            remedy = "channels come first: images.permute(0, 3, 1, 2)"
        raise ValueError(
            f"images have {x.shape[1]} channels, expected {in_chans}; {remedy}; "
            f"their shape is {list(x.shape)}, expected (batch, channels, height, width)"
        )
    if x.shape[0] == 0 or x.shape[2] == 0 or x.shape[3] == 0:
        raise ValueError(f"images have shape {list(x.shape)}, expected at least one image of at least one pixel")
    if not x.is_floating_point():
        raise TypeError(
            f"images are {x.dtype}, expected floating point; convert to float in [0, 1] and normalise by the mean and "
            "standard deviation that the model was trained with"
        )
    # Other dtypes may differ from that of the weights under autocast.
    if (x.dtype == torch.float64) != (weight.dtype == torch.float64):
        raise TypeError(
            f"images are {x.dtype} and the weights of the model {weight.dtype}, expected one dtype; "
            "convert both by .float(), or both by .double()"
        )


@register_notrace_function
def check_same_size(size: tuple[int, int], expected: tuple[int, int]) -> None:
    """Raises ValueError if an image does not have the size that the model was made for."""
    if size[0] != expected[0] or size[1] != expected[1]:
        raise ValueError(
            f"image is {size[0]}x{size[1]}, expected {expected[0]}x{expected[1]}; give img_size= or "
            "dynamic_img_size=True to the model, or call its set_input_size"
        )


@register_notrace_function
def check_image_size(size: tuple[int, int], patch_size: tuple[int, int], stride: tuple[int, int]) -> None:
    """Raises ValueError if an image is not a whole number of patches."""
    over_h, over_w = size[0] - patch_size[0], size[1] - patch_size[1]
    if over_h < 0 or over_w < 0 or over_h % stride[0] != 0 or over_w % stride[1] != 0:
        raise ValueError(
            f"image of {size[0]}x{size[1]} is not a whole number of {patch_size[0]}x{patch_size[1]} patches at "
            f"stride {stride[0]}x{stride[1]}; resize it, or give dynamic_img_pad=True to the model"
        )


@register_notrace_function  # branches on shapes cannot be traced
def padding(size: tuple[int, int], patch_size: tuple[int, int], stride: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns to add so that the image is a whole number of patches."""
    short_h, short_w = patch_size[0] - size[0], patch_size[1] - size[1]
    return short_h if short_h > 0 else short_h % stride[0], short_w if short_w > 0 else short_w % stride[1]
