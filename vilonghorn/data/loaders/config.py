"""The options of a loader, their defaults and ranges.

The sections `data` and `augmentation` of a run's configuration extend `ImageConfig` and `TransformConfig`.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np
import torch
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import to_2tuple

from ..augment.policy import Policy
from ..image_file import MAX_PIXELS

CROP_MODES = ("center", "squash", "border")
SIZE_STEP = 32  # pixels; sizes of a progressive resolution are multiples of it, as in ffcv-imagenet


def within(interval: str, default: Any) -> Any:
    """A dataclass field whose number, or each of its numbers, lies in `interval`, such as "(0, 1]"; None is allowed."""
    return field(default=default, metadata={"interval": interval})


def check_intervals(options: Any, section: str = "") -> None:
    """Raises ValueError if a number that `within` declared is outside of its interval; `section` precedes its name."""
    for option in fields(options):
        if (interval := option.metadata.get("interval")) is None:
            continue
        low, high = (float(end) for end in interval[1:-1].split(","))
        above, below = (operator.lt if bracket in "()" else operator.le for bracket in (interval[0], interval[-1]))
        value = getattr(options, option.name)
        for number in value if isinstance(value, Sequence) else [value]:
            if number is not None and not (above(low, number) and below(number, high)):
                raise ValueError(f"{section}{option.name} is {value}; it must lie in {interval}")


@dataclass
class ImageConfig:
    """How images are read.

    Args:
        batch_size: images in a batch of one process
        image_size: height and width of the images that the model sees, in pixels: one number, or [height, width]
        mean: mean of each channel of images in [0, 1], subtracted
        std: standard deviation of each channel, divided by
        crop_pct: side of the centre crop in evaluation, as a fraction of the largest that fits
        crop_mode: what evaluation shows, as in timm: center (the largest crop of this shape, times crop_pct),
            squash (the image squeezed, times crop_pct) or border (the whole image, with borders; not for a .beton)
        interpolation: from that crop to image_size: bicubic (with antialiasing, PIL's) or area (average, faster)
        workers: decoding threads (.beton) or processes (folder; 0 decodes in the main process); null: one for each CPU,
            shared by the processes of torchrun, for a folder at most 8
        max_pixels: refuse an image file of a folder with more pixels (width times height), which fill the memory
        checksums: compare each image of a .beton with the checksum in its manifest when it is first read; null: if
            there are checksums; true: require them
    """

    batch_size: int = within("[1, inf)", 128)
    image_size: int | tuple[int, int] = within("[1, 20000]", 224)
    mean: tuple[float, float, float] = within("(-inf, inf)", IMAGENET_DEFAULT_MEAN)
    std: tuple[float, float, float] = within("(0, inf)", IMAGENET_DEFAULT_STD)
    crop_pct: float = within("(0, 1]", 0.875)
    crop_mode: Literal["center", "squash", "border"] = "center"
    interpolation: Literal["bicubic", "area"] = "bicubic"
    workers: int | None = within("[0, 1024]", None)
    max_pixels: int = within("[1, inf)", MAX_PIXELS)
    checksums: bool | None = None


@dataclass
class TransformConfig:
    """How training images are cropped and augmented.

    Args:
        scale: smallest and largest area of the random crop, as a fraction of the image
        ratio: smallest and largest width over height of the random crop
        interpolation: from that crop to image_size: area or bicubic; null: area for a .beton, bicubic for a folder
        hflip: probability of a horizontal flip
        auto_augment: timm's name of a RandAugment or AutoAugment policy such as rand-m9-mstd0.5-inc1, or 3a, the
            3-Augment of DeiT III; null: none
        color_jitter: strength of the jitter of brightness, contrast and saturation; replaced by a policy other than 3a
        erase: probability that a rectangle is replaced by normal noise (random erasing, pixel mode)
        repeats: repeated augmentation: each image appears this often in a row, and an epoch covers 1/repeats of them
        start_size: height and width of the images in the first epochs, from which they grow; null: image_size
        ramp: first and last epoch, counted from 0, of the growth from start_size to image_size, in steps of 32 pixels
        sizes: sides in pixels, one drawn for each batch, to which images of image_size are reduced; []: image_size
    """

    scale: tuple[float, float] = within("(0, 1]", (0.08, 1.0))
    ratio: tuple[float, float] = within("(0, inf)", (3 / 4, 4 / 3))
    interpolation: Literal["area", "bicubic"] | None = None
    hflip: float = within("[0, 1]", 0.5)
    auto_augment: str | None = None
    color_jitter: float = within("[0, 1]", 0.0)
    erase: float = within("[0, 1]", 0.0)
    repeats: int = within("[1, 65536]", 1)
    start_size: int | None = within("[1, inf)", None)
    ramp: tuple[int, int] = within("[0, inf)", (0, 0))
    sizes: list[int] = field(default_factory=list, metadata={"interval": "[1, inf)"})

    def grown_size(self, epoch: float, image_size: int | tuple[int, int]) -> tuple[int, int]:
        """Height and width of the images of an epoch: start_size up to ramp[0], `image_size` from ramp[1] on."""
        height, width = to_2tuple(image_size)
        if self.start_size is None or epoch >= self.ramp[1]:
            return height, width
        step = round(np.interp(epoch, self.ramp, (self.start_size, height)) / SIZE_STEP) * SIZE_STEP
        side = self.start_size if epoch <= self.ramp[0] else min(height, max(self.start_size, step))
        return side, side

    def check_transforms(self, image_size: int | tuple[int, int], mean: Sequence[float], section: str = "") -> None:
        """Raises ValueError if options contradict each other, or timm does not know the policy of this name."""
        for name in ("scale", "ratio", "ramp"):
            low, high = getattr(self, name)
            if low > high:
                raise ValueError(f"{section}{name} is {[low, high]}; give the smaller bound first")
        start, ramp, sizes = self.start_size, list(self.ramp), list(self.sizes)
        if not isinstance(image_size, int) and (start or sizes):
            given = f"{section}sizes is {sizes}" if sizes else f"{section}start_size is {start}"
            raise ValueError(f"{given}, for square images, but image_size is {list(image_size)}: give one number")
        side = max(to_2tuple(image_size))
        if sizes and max(sizes) > side:
            raise ValueError(f"{section}sizes is {sizes}, above the image size, which is {image_size}")
        if sizes and start:
            raise ValueError(f"{section}sizes is {sizes} and {section}start_size is {start}: give one of the two")
        if start and start > side:
            raise ValueError(f"{section}start_size is {start}, above the image size, which is {image_size}")
        if start and not ramp[1]:
            problem = f"{section}start_size is {start} but {section}ramp is {ramp}, so that no image would have it"
            raise ValueError(f"{problem}: give the epochs between which images grow")
        if self.auto_augment:
            Policy(self.auto_augment, mean)


@dataclass(kw_only=True)
class LoaderConfig(TransformConfig, ImageConfig):
    """All options of a loader. `ImageConfig` and `TransformConfig` describe the inherited ones.

    Args:
        training: shuffled random crops, augmented, in full batches; else centre crops in the order of the source
        interpolation: None: area for training on a .beton, else bicubic
        classes: class names by label, of which the source may lack some; None: those of the source
        labelled: False: images at any depth of a folder, or of a .beton, without their classes
        seed: of order and augmentation
        device: where batches go
        rank: number of this process
        world_size: number of processes, each of which reads a part of every batch
    """

    training: bool
    classes: Sequence[str] | None = None
    labelled: bool = True
    seed: int = within("[0, 9223372036854775808)", 0)  # 63 bits
    device: str | torch.device = "cpu"
    rank: int = 0
    world_size: int = 1

    def __post_init__(self):
        self.device = torch.device(self.device)
        for name, count in {"image_size": 2, "mean": 3, "std": 3, "scale": 2, "ratio": 2, "ramp": 2}.items():
            if len(to_2tuple(value := getattr(self, name))) != count:
                raise ValueError(f"{name} is {value}; expected {count} numbers")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank is {self.rank}; expected 0 to world_size - 1, which is {self.world_size - 1}")
        check_intervals(self)
        self.check_transforms(self.image_size, self.mean)
        for name, known in {"interpolation": (None, "area", "bicubic"), "crop_mode": CROP_MODES}.items():
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"{name} is {value!r}; expected {' or '.join(filter(None, known))}")

    def size_at(self, epoch: int) -> tuple[int, int]:
        """Height and width of the images of an epoch."""
        return self.grown_size(epoch if self.training else np.inf, self.image_size)
