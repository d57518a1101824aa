"""Draws which operations of timm's RandAugment and AutoAugment policies each image of a batch gets, and how strong.

timm parses the policy's name into operations, probabilities and magnitudes. Random numbers are drawn here, for a whole
batch from (seed, epoch, view), because timm draws for one image at a time from Python's global generator.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import zip_longest

import numpy as np
import torch
from timm.data.auto_augment import AugmentOp, auto_augment_transform, rand_augment_transform

from ..rng import AUGMENT, JITTER, uniform

FULL = 10  # timm's full magnitude
DRAWS = 5  # random numbers for each operation of a view: which, whether, magnitude, sign, and one for the operation
MAX_LAYERS = (JITTER - AUGMENT) // DRAWS


# From magnitudes (0 to 10, more with mmax), signs (1 or -1) and uniform numbers to the arguments of timm's operation.
ARGUMENTS = {
    **dict.fromkeys(("AutoContrast", "Equalize", "Invert")),
    **dict.fromkeys(("Color", "Contrast", "Brightness", "Sharpness"), lambda level, sign, number: 0.18 * level + 0.1),
    **dict.fromkeys(
        ("ColorIncreasing", "ContrastIncreasing", "BrightnessIncreasing", "SharpnessIncreasing"),
        lambda level, sign, number: np.maximum(0.1, 1 + sign * 0.09 * level),
    ),
    "Rotate": lambda level, sign, number: sign * 3 * level,
    **dict.fromkeys(("ShearX", "ShearY"), lambda level, sign, number: sign * 0.03 * level),
    **dict.fromkeys(("TranslateXRel", "TranslateYRel"), lambda level, sign, number: sign * 0.045 * level),
    "Posterize": lambda level, sign, number: np.trunc(level / FULL * 4),
    "PosterizeIncreasing": lambda level, sign, number: 4 - np.trunc(level / FULL * 4),
    "PosterizeOriginal": lambda level, sign, number: 4 + np.trunc(level / FULL * 4),
    "Solarize": lambda level, sign, number: np.minimum(256, np.trunc(level / FULL * 256)),
    "SolarizeIncreasing": lambda level, sign, number: 256 - np.minimum(256, np.trunc(level / FULL * 256)),
    "SolarizeAdd": lambda level, sign, number: np.minimum(128, np.trunc(level / FULL * 110)),
    "Desaturate": lambda level, sign, number: np.clip(0.5 + 0.05 * level, 0.5, 1),
    "GaussianBlur": lambda level, sign, number: np.clip(0.1 + 0.19 * level, 0.1, 2),
    "GaussianBlurRand": lambda level, sign, number: 0.1 + number * (2 * np.clip(level / FULL, 0, 1) - 0.1),
}


# One of timm's operations: its name, (n,) rows of the batch, and (n,) float64 arguments, if it has any.
Step = tuple[str, np.ndarray, np.ndarray | None]


class Policy:
    """A policy by timm's name, such as "rand-m9-mstd0.5-inc1" or "3a"; `mean` of each channel is in 0 to 1.

    `fill` is the colour of uncovered pixels. Raises ValueError if the policy, or one of its operations, is not known.
    """

    def __init__(self, name: str, mean: Sequence[float]):
        self.fill = tuple(min(255, round(255 * value)) for value in mean)
        self._independent = name.startswith("rand")  # else the first draw chooses a sequence of operations
        hparams = {"translate_const": 100, "img_mean": self.fill}
        try:
            for section in name.split("-")[1:]:
                if not section.startswith("t") and not any(map(str.isdigit, section)):  # t: the name of a set
                    raise ValueError(f"{section!r} has no number, as in mstd0.5 or inc1")  # timm would ignore it
            if self._independent:
                transform = rand_augment_transform(name, hparams)
                layers = [transform.ops] * min(transform.num_layers, MAX_LAYERS + 1)
                if transform.choice_weights is not None:
                    raise ValueError("weights of operations are not supported")
            else:
                layers = list(zip_longest(*auto_augment_transform(name, hparams).policy))
            if unknown := {op.name for layer in layers for op in layer if op} - ARGUMENTS.keys():
                raise ValueError(f"{', '.join(sorted(unknown))} cannot be done on a batch")
            if not 1 <= len(layers) <= MAX_LAYERS:
                raise ValueError(f"expected 1 to {MAX_LAYERS} operations in a row")
        except (AssertionError, ValueError, IndexError) as error:
            remedy = "give a policy of timm such as rand-m9-mstd0.5-inc1"
            raise ValueError(f"auto_augment {name!r}: {str(error) or 'not a policy of timm'}; {remedy}") from None
        self.layers: Sequence[Sequence[AugmentOp | None]] = layers

    def plan(self, seed: int, epoch: int, views: np.ndarray) -> Iterator[Step]:
        """Draws the operations on a batch with `views` (B,), in their order."""
        uniforms = uniform(seed, epoch, views, len(self.layers) * DRAWS, AUGMENT).reshape(len(views), -1, DRAWS)
        for layer, ops in enumerate(self.layers):
            choice = (uniforms[:, layer if self._independent else 0, 0] * len(ops)).astype(np.int64)
            for index, op in enumerate(ops):
                rows = np.flatnonzero((choice == index) & (uniforms[:, layer, 1] < op.prob)) if op else ()
                if len(rows) > 0:
                    _, _, magnitude, sign, number = uniforms[rows, layer].T
                    argument, signs = ARGUMENTS[op.name], np.where(sign < 0.5, -1.0, 1.0)
                    yield op.name, rows, argument(_levels(op, magnitude), signs, number) if argument else None


def _levels(op: AugmentOp, uniforms: np.ndarray) -> np.ndarray:
    """Magnitudes (n,) of an operation: fixed, normal around it, or uniform up to it (mstd 100 and more)."""
    levels = np.full(len(uniforms), float(op.magnitude))
    if op.magnitude_std == math.inf:
        levels *= uniforms
    elif op.magnitude_std > 0:  # standard normal numbers, by the inverse of the distribution function
        levels += op.magnitude_std * torch.special.ndtri(torch.from_numpy(np.maximum(uniforms, 2.0**-54))).numpy()
    return np.clip(levels, 0, op.magnitude_max or FULL)
