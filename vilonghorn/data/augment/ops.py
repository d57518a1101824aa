"""timm's augmentation operations on a batch of images, each image with its own argument, rounded as PIL rounds.

Images are uint8 (n, 3, H, W) on any device, of any strides. `benchmarks/pixels.py` measures the difference to PIL.
"""

import math

import torch
import torch.nn.functional as F
from torchvision.transforms.v2 import functional as tv

Fill = tuple[int, ...]  # colour of the pixels that a geometric operation uncovers


def apply(name: str, images: torch.Tensor, arguments: torch.Tensor | None, fill: Fill) -> torch.Tensor:
    """Applies one of timm's operations, one of `policy.ARGUMENTS`. Returns new images, (n, 3, H, W) uint8.

    `arguments` (n,) are float32 on the images' device, as timm's operation takes them; None where it takes none.
    """
    if arguments is None:
        return {"AutoContrast": tv.autocontrast, "Equalize": tv.equalize, "Invert": tv.invert}[name](images)
    name = name.removesuffix("Increasing").removesuffix("Original").removesuffix("Rand")
    if name in AFFINE:
        return warp(images, AFFINE[name](arguments, images.shape[3], images.shape[2]), fill)
    return POINTWISE[name](images, arguments.view(-1, 1, 1, 1))


def blend(images: torch.Tensor, other: torch.Tensor | int, factor: torch.Tensor) -> torch.Tensor:
    """`other` + `factor` * (`images` - `other`), clamped to 0..255 and truncated, as by PIL's enhancers."""
    return images.float().sub_(other).mul_(factor).add_(other).clamp_(0, 255).to(torch.uint8)


def gray(images: torch.Tensor) -> torch.Tensor:
    """(n, 1, H, W) float32 whole numbers, rounded as by PIL; torchvision truncates bytes."""
    return tv.rgb_to_grayscale(images.float()).round_()


def contrast(images: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Blends with the mean of the gray image, rounded."""
    return blend(images, gray(images).mean((1, 2, 3), keepdim=True).add_(0.5).floor_(), factor)


def gaussian_blur(images: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """Gaussian blur with reflected edges; `sigma` (n, 1, 1, 1) in pixels, at most 2."""
    pairs = zip(images, sigma.flatten().tolist())
    return torch.stack([tv.gaussian_blur(image, [13, 13], [side, side]) for image, side in pairs])


# From images and arguments (n, 1, 1, 1) to images.
POINTWISE = {
    "Brightness": lambda images, factor: blend(images, 0, factor),
    "Contrast": contrast,
    "Color": lambda images, factor: blend(images, gray(images), factor),
    "Sharpness": lambda images, factor: blend(images, tv.adjust_sharpness(images, 0.0), factor),
    "Desaturate": lambda images, amount: blend(images, gray(images), 1 - amount),
    "Posterize": lambda images, bits: images & (256 - torch.exp2(8 - bits)).to(torch.uint8),
    "Solarize": lambda images, threshold: torch.where(images < threshold, images, 255 - images),
    "SolarizeAdd": lambda images, added: torch.where(images < 128, images + added.to(torch.uint8), images),
    "GaussianBlur": gaussian_blur,
}


def _matrix(*entries: torch.Tensor | float, like: torch.Tensor) -> torch.Tensor:
    """(n, 2, 3) from six entries, each a number or (n,)."""
    return torch.stack([torch.as_tensor(e, device=like.device).expand_as(like) for e in entries], 1).view(-1, 2, 3)


def _rotation(degrees: torch.Tensor, width: int, height: int) -> torch.Tensor:
    angle = -degrees * (math.pi / 180)
    cos, sin = angle.cos(), angle.sin()
    x, y = width / 2, height / 2
    return _matrix(cos, sin, x - x * cos - y * sin, -sin, cos, y + x * sin - y * cos, like=degrees)


# From arguments (n,), width and height to PIL's affine coefficients (n, 2, 3), from output pixels to input pixels.
AFFINE = {
    "Rotate": _rotation,
    "ShearX": lambda a, width, height: _matrix(1.0, a, 0.0, 0.0, 1.0, 0.0, like=a),
    "ShearY": lambda a, width, height: _matrix(1.0, 0.0, 0.0, a, 1.0, 0.0, like=a),
    "TranslateXRel": lambda a, width, height: _matrix(1.0, 0.0, a * width, 0.0, 1.0, 0.0, like=a),
    "TranslateYRel": lambda a, width, height: _matrix(1.0, 0.0, 0.0, 0.0, 1.0, a * height, like=a),
}


def warp(images: torch.Tensor, matrices: torch.Tensor, fill: Fill) -> torch.Tensor:
    """Bicubic affine transformation by `matrices` (n, 2, 3), from output pixels to places in the input, in pixels."""
    height, width = images.shape[-2:]
    linear, shift = matrices[:, :, :2], matrices[:, :, 2]
    half = matrices.new_tensor([width, height]) / 2  # pixels in a unit of the coordinates from -1 to 1 that torch takes
    scaled = linear * half / half[:, None]
    moved = (linear @ half + shift) / half - 1
    grid = F.affine_grid(torch.cat([scaled, moved[:, :, None]], 2), list(images.shape), align_corners=False)
    warped = F.grid_sample(images.float(), grid, mode="bicubic", padding_mode="border", align_corners=False)
    inside = ((grid >= -1) & (grid < 1)).all(3).unsqueeze(1)
    colour = matrices.new_tensor(fill).view(1, 3, 1, 1)
    return torch.where(inside, warped, colour).round_().clamp_(0, 255).to(torch.uint8)
