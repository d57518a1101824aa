"""Reads and checks images with PNG masks for segmentation.

Image `a/b.jpg` has the mask `b.png`, whose pixels are class numbers: 0 for the first class, 255 for pixels that are
ignored. Masks are gray of 8 or 16 bits, black and white (0 and 1) or palettes, whose indices are the numbers. A mask
has the size of the upright photograph: `read_image` turns it as its EXIF orientation says.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import common
import numpy as np
import torch
from PIL import ExifTags, Image
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2

from vilonghorn import read_image
from vilonghorn.data.image_file import EXTENSIONS

IGNORED = 255


def read_mask(path: Path, classes: int) -> np.ndarray:
    """Class numbers and `IGNORED`, (H, W) uint8. Raises ValueError if the file is something else."""
    try:
        with Image.open(path, formats=["PNG"]) as mask:
            mode, bits = mask.mode, mask.tile[0].args
            turned = mask.getexif().get(ExifTags.Base.Orientation, 1) != 1
            values = np.asarray(mask)
    except Exception as error:  # decoders raise nearly any exception on a damaged file
        raise ValueError(f"{path}: not a readable PNG file ({error})") from error
    if mode not in ("1", "L", "P", "I;16"):
        remedy = "write one channel of class numbers, such as numpy.where((rgb == (255, 0, 0)).all(2), 1, 0)"
        raise ValueError(f"{path}: a mask of mode {mode}, expected gray or a palette: {remedy}")
    if mode == "L" and bits != "L":  # Pillow scales them to 0..255
        raise ValueError(f"{path}: a gray mask of {bits[2:]} bits, expected 8 or 16: write it as 8 bits")
    if turned:
        raise ValueError(f"{path}: a mask with an EXIF orientation: write it upright, without EXIF")
    wrong = np.setdiff1d(values, [*range(classes), IGNORED])
    if len(wrong):
        found = f"{', '.join(map(str, wrong[:10].tolist()))}{', ...' * (len(wrong) > 10)}"
        raise ValueError(
            f"{path}: class number(s) {found}; expected 0 to {classes - 1}, or {IGNORED} for ignored pixels"
        )
    return values.astype(np.uint8)


class ImagesWithMasks(Dataset):
    """Images (3, H, W) float32 from 0 to 1 and masks (H, W) uint8; `problems` lists what is wrong with the files."""

    def __init__(self, images: Path, masks: Path, classes: int, augment: list[nn.Module]) -> None:
        self.classes, self.transform = classes, v2.Compose([*augment, v2.ToDtype(torch.float32, scale=True)])
        pictures = sorted(path for path in images.iterdir() if path.suffix.lower() in EXTENSIONS)
        files = sorted(path for path in masks.iterdir() if path.suffix.lower() == ".png")
        found, names = {path.stem: path for path in files}, {path.stem for path in pictures}
        self.pairs = [(path, found[path.stem]) for path in pictures if path.stem in found]
        self.problems = [] if pictures else [f"{images}: there are no images"]
        for path in pictures:
            if path.stem not in found:
                self.problems.append(f"{path}: there is no mask {masks / path.stem}.png")
        self.problems += [
            f"{path}: there is no image of this name in {images}" for path in files if path.stem not in names
        ]
        for folder, own in ((images, pictures), (masks, files)):
            counts = Counter(path.stem for path in own)
            self.problems += [
                f"{folder}: {n} files are named {stem}; expected one" for stem, n in counts.items() if n > 1
            ]
        sizes, unread = common.check(lambda path: read_image(path).size, pictures)
        shapes, wrong = common.check(lambda path: read_mask(path, classes).shape[::-1], files)
        self.problems += unread + wrong
        for image, mask in self.pairs:
            a, b = sizes.get(image), shapes.get(mask)
            if a and b and a != b:
                turned = "; the photograph is turned by its EXIF orientation: turn the mask, too" * (a == b[::-1])
                self.problems.append(f"{mask}: {b[0]}x{b[1]} pixels, but {image} has {a[0]}x{a[1]} upright{turned}")

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, mask = self.pairs[index]
        pixels = tv_tensors.Image(v2.functional.pil_to_tensor(read_image(image)))
        return self.transform(pixels, tv_tensors.Mask(torch.from_numpy(read_mask(mask, self.classes))))
