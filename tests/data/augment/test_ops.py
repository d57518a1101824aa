"""Operations on a batch do what timm does with PIL, image by image, on any strides; erasing is timm's."""

import random

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import auto_augment as timms
from timm.data.random_erasing import RandomErasing

from vilonghorn.data import LoaderConfig, create_loader
from vilonghorn.data.augment import Augmentation, ops
from vilonghorn.data.augment.policy import ARGUMENTS

FILL = (124, 116, 104)
# Mean absolute difference to PIL in levels of 255. The weights of gray, the rounding of a mean and the order of
# roundings make less than one level; cubic interpolation has other coefficients, and a blur that is not three boxes.
EXACT = dict.fromkeys(
    "Invert Posterize PosterizeIncreasing PosterizeOriginal Solarize SolarizeIncreasing SolarizeAdd".split(), 0
)
LOOSE = {"Equalize": 1.5, "GaussianBlur": 1.0, "Rotate": 1.0, "ShearX": 1.0, "ShearY": 1.0}
VALUES = {
    "Rotate": [-30, 7.5, 27],
    "ShearX": [-0.3, 0.27],
    "ShearY": [-0.3, 0.27],
    "TranslateXRel": [-0.45, 0.2, 0.405],
    "TranslateYRel": [-0.45, 0.2, 0.405],
    **dict.fromkeys(("Posterize", "PosterizeIncreasing", "PosterizeOriginal"), [1, 4, 7]),
    **dict.fromkeys(("Solarize", "SolarizeIncreasing"), [0, 26, 128, 256]),
    "SolarizeAdd": [0, 99, 110],
    "Desaturate": [0.5, 1.0],
    "GaussianBlur": [0.1, 0.8, 2.0],
    "GaussianBlurRand": [],
}


def batch(photo, count, width=61, height=45):
    images = [photo(i, width, height) for i in range(count)]
    return images, torch.stack([torch.from_numpy(np.array(image)) for image in images]).permute(0, 3, 1, 2)


@pytest.mark.parametrize("layout", ["channels last", "contiguous"])
@pytest.mark.parametrize("name", [name for name in ARGUMENTS if name != "GaussianBlurRand"])
def test_an_operation_is_timms_within_rounding(photo, name, layout):
    values = VALUES.get(name, [0.1, 0.7, 1.0, 1.9] if ARGUMENTS[name] else [None] * 4)
    images, tensor = batch(photo, len(values))
    if layout == "contiguous":
        tensor = tensor.contiguous()
    arguments = None if values[0] is None else torch.tensor(values, dtype=torch.float32)
    found = ops.apply(name, tensor, arguments, FILL)
    assert found.dtype == torch.uint8 and found.shape == tensor.shape
    for image, value, result in zip(images, values, found, strict=True):
        keywords = {"fillcolor": FILL, "resample": Image.Resampling.BICUBIC}
        argument = () if value is None else (int(value) if name in EXACT else value,)
        expected = np.asarray(timms.NAME_TO_OP[name](image, *argument, **keywords), float)
        difference = np.abs(result.permute(1, 2, 0).numpy() - expected).mean()
        assert difference <= EXACT.get(name, LOOSE.get(name, 0.75))


def test_erasing_has_timms_law_and_noise():
    erase = Augmentation(LoaderConfig(training=True, erase=0.4)).erase
    images = erase(torch.zeros(600, 3, 64, 64), 0, np.arange(600))
    erased = (images != 0).any(1).flatten(1).float().mean(1)
    timm = RandomErasing(0.4, mode="pixel", device="cpu")
    random.seed(0), torch.manual_seed(0)
    expected = (timm(torch.zeros(600, 3, 64, 64)) != 0).any(1).flatten(1).float().mean(1)
    assert abs((erased > 0).float().mean() - 0.4) < 0.08
    hit, wanted = erased[erased > 0], expected[expected > 0]
    assert abs(hit.mean() - wanted.mean()) < 0.03 and 0.015 < hit.min() and hit.max() < 0.36
    noise = images.permute(0, 2, 3, 1)[(images != 0).any(1)]
    assert abs(noise.mean()) < 0.02 and abs(noise.std() - 1) < 0.02
    assert len(torch.unique(hit)) > 20


@pytest.mark.needs_ffcv
def test_jitter_is_off_beside_randaugment_and_on_beside_three_augment(raw_beton):
    options = {"batch_size": 8, "image_size": 16, "training": True}
    for policy, same in (("rand-m9-mstd0.5-inc1", True), ("3a", False), (None, False)):
        plain, jittered = (
            next(create_loader(raw_beton, **options, auto_augment=policy, color_jitter=c).epoch(0))[0] for c in (0, 0.3)
        )
        assert torch.equal(plain, jittered) == same
