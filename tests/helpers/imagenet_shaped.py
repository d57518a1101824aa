"""A folder in the form of ImageNet: classes by WordNet number, some odd images, and flat validation images."""

from pathlib import Path

import numpy as np
from PIL import Image
from scipy.io import savemat

SYNSETS = ["n03000000", "n01000000", "n04000000", "n02000000"]  # by class number, which is not the sorted order
TRAIN, VAL = 60, 15  # images of a class
MEAN_SIDE = 90  # pixels


def picture(rng: np.random.Generator, label: int) -> Image.Image:
    """A photograph's stand-in of one class: coarse random colours under stripes of the class's direction and hue."""
    width, height = rng.integers(MEAN_SIDE - 20, MEAN_SIDE + 21, 2).tolist()
    coarse = Image.fromarray(rng.integers(60, 196, (4, 5, 3), dtype=np.uint8)).resize((width, height))
    y, x = np.mgrid[:height, :width] * 2 * np.pi / 12
    angle = np.pi * label / len(SYNSETS)
    stripes = np.sin(x * np.cos(angle) + y * np.sin(angle) + rng.uniform(0, 6))[..., None]
    hue = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0]])[label]
    return Image.fromarray(np.clip(np.asarray(coarse) + 50 * stripes * hue, 0, 255).astype(np.uint8))


def make_imagenet(root: Path) -> dict[str, int]:
    """Makes root/train/nXXXXXXXX/*.JPEG, root/val/*.JPEG and root/devkit/data with meta.mat and the ground truth.

    Returns:
        How many of the training images are gray, CMYK, turned by EXIF data, and corrupt.
    """
    rng = np.random.default_rng(0)
    odd = {"gray": 0, "CMYK": 0, "turned": 0, "corrupt": 0}
    for label, name in enumerate(sorted(SYNSETS)):
        (root / "train" / name).mkdir(parents=True)
        for i in range(TRAIN):
            image, options = picture(rng, label), {"format": "JPEG", "quality": 92}
            if i % 20 == 1:
                image, kind = image.convert("L"), "gray"
            elif i == 2:
                image, kind = image.convert("CMYK"), "CMYK"
            elif i % 20 == 3:
                exif = Image.Exif()
                exif[0x0112] = 6
                image, kind = image.rotate(90, expand=True), "turned"
                options["exif"] = exif
            else:
                kind = None
            file = root / "train" / name / f"{name}_{i}.JPEG"
            image.save(file, **options)
            if label == 2 and i == 5:
                kind = "corrupt"
                file.write_bytes(file.read_bytes()[:-900])
            if kind:
                odd[kind] += 1
    numbers = rng.permutation(np.repeat(np.arange(1, len(SYNSETS) + 1), VAL))
    (root / "val").mkdir()
    for i, number in enumerate(numbers, 1):
        label = sorted(SYNSETS).index(SYNSETS[number - 1])
        picture(rng, label).save(root / "val" / f"ILSVRC2012_val_{i:08d}.JPEG", quality=92)
    data = root / "devkit" / "data"
    data.mkdir(parents=True)
    (data / "ILSVRC2012_validation_ground_truth.txt").write_text("".join(f"{n}\n" for n in numbers))
    kinds = [("ILSVRC2012_ID", float), ("WNID", object), ("words", object), ("num_children", float)]
    rows = [(i, name, "words", 0) for i, name in enumerate(SYNSETS, 1)] + [(len(SYNSETS) + 1, "n00001740", "entity", 2)]
    savemat(data / "meta.mat", {"synsets": np.array(rows, kinds).reshape(-1, 1)})
    return odd
