"""Which operations timm's RandAugment and AutoAugment policies do to each image of a batch, and how strongly.

timm reads the policy's name and holds its operations, probabilities and magnitudes; the numbers are drawn here, for a
whole batch and from (seed, epoch, view), because timm draws one image at a time from Python's global generator. The
pixels are left to `pixels`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from timm.data.auto_augment import AugmentOp, auto_augment_transform, rand_augment_transform

from ..rng import AUGMENT, JITTER, uniform

DENOMINATOR = 10  # timm's full magnitude
DRAWS = 5  # for each operation of a view: which, whether, magnitude, sign, and one more where an operation draws itself
MAX_LAYERS = (JITTER - AUGMENT) // DRAWS


def _enhance(level, sign, more):
    return 0.18 * level + 0.1


def _enhance_increasing(level, sign, more):
    return np.maximum(0.1, 1 + sign * 0.09 * level)


def _threshold(level, sign, more):
    return np.minimum(256, np.trunc(level / DENOMINATOR * 256))


# From a magnitude (0 to 10, more with mmax), a sign (1 or -1) and a uniform number to the operation's argument.
ARGUMENTS = {
    "AutoContrast": None,
    "Equalize": None,
    "Invert": None,
    "Rotate": lambda level, sign, more: sign * 3 * level,
    "ShearX": lambda level, sign, more: sign * 0.03 * level,
    "ShearY": lambda level, sign, more: sign * 0.03 * level,
    "TranslateXRel": lambda level, sign, more: sign * 0.045 * level,
    "TranslateYRel": lambda level, sign, more: sign * 0.045 * level,
    "Posterize": lambda level, sign, more: np.trunc(level / DENOMINATOR * 4),
    "PosterizeIncreasing": lambda level, sign, more: 4 - np.trunc(level / DENOMINATOR * 4),
    "PosterizeOriginal": lambda level, sign, more: 4 + np.trunc(level / DENOMINATOR * 4),
    "Solarize": _threshold,
    "SolarizeIncreasing": lambda level, sign, more: 256 - _threshold(level, sign, more),
    "SolarizeAdd": lambda level, sign, more: np.minimum(128, np.trunc(level / DENOMINATOR * 110)),
    **dict.fromkeys(("Color", "Contrast", "Brightness", "Sharpness"), _enhance),
    **dict.fromkeys(
        ("ColorIncreasing", "ContrastIncreasing", "BrightnessIncreasing", "SharpnessIncreasing"), _enhance_increasing
    ),
    "Desaturate": lambda level, sign, more: np.clip(0.5 + 0.05 * level, 0.5, 1),
    "GaussianBlur": lambda level, sign, more: np.clip(0.1 + 0.19 * level, 0.1, 2),
    "GaussianBlurRand": lambda level, sign, more: 0.1 + more * (2 * np.clip(level / DENOMINATOR, 0, 1) - 0.1),
}


def normal(uniforms: np.ndarray) -> np.ndarray:
    """Standard normal numbers from uniform ones in [0, 1), by the inverse of the distribution function."""
    return torch.special.ndtri(torch.from_numpy(np.maximum(uniforms, 2.0**-54))).numpy()


@dataclass(frozen=True)
class Step:
    """One operation on some images of a batch.

    Attributes:
        name: of the operation, timm's.
        rows: (n,) positions in the batch.
        arguments: (n,) float64, as timm's operation takes it; None where it takes none.
    """

    name: str
    rows: np.ndarray
    arguments: np.ndarray | None


class Policy:
    """A policy by its name in timm's notation, such as "rand-m9-mstd0.5-inc1" or "3a".

    Attributes:
        fill: (3,) colour, 0 to 255, of what a geometric operation uncovers.

    Args:
        name: of the policy.
        mean: of the images in 0 to 1, which gives the fill.

    Raises:
        ValueError: timm does not know the policy, or it has operations that are not known here.
    """

    def __init__(self, name: str, mean: tuple[float, ...]):
        self.fill = tuple(min(255, round(255 * value)) for value in mean)
        hparams = {"translate_const": 100, "img_mean": self.fill}
        try:
            for section in name.split("-")[1:]:
                if not section.startswith("t") and not any(map(str.isdigit, section)):  # t: the name of a set
                    raise ValueError(f"{section!r} has no number, as in mstd0.5 or inc1")  # timm would leave it out
            if name.startswith("rand"):
                timms = rand_augment_transform(name, hparams)
                self._choices = [timms.ops] * timms.num_layers
                weighted = timms.choice_weights is not None
            else:
                self._choices = auto_augment_transform(name, hparams).policy
                weighted = False
        except (AssertionError, ValueError, IndexError) as error:
            raise ValueError(f"auto_augment {name!r}: not a policy of timm ({error})") from None
        self._independent = name.startswith("rand")  # else the choice of the first operation is that of a whole row
        layers = self._choices if self._independent else list(zip(*self._padded(self._choices)))
        self.layers: list[list[AugmentOp | None]] = [list(layer) for layer in layers]
        unknown = sorted({op.name for layer in self.layers for op in layer if op and op.name not in ARGUMENTS})
        if weighted or unknown or not 1 <= len(self.layers) <= MAX_LAYERS:
            what = f"operations {', '.join(unknown)}" if unknown else "weights" if weighted else f"{len(layers)} layers"
            raise ValueError(f"auto_augment {name!r}: its {what} cannot be done on the batch; try rand-m9-mstd0.5-inc1")

    @staticmethod
    def _padded(rows: list[list[AugmentOp]]) -> list[list[AugmentOp | None]]:
        longest = max(map(len, rows))
        return [row + [None] * (longest - len(row)) for row in rows]

    def plan(self, seed: int, epoch: int, views: np.ndarray) -> Iterator[Step]:
        """What is done to the images of a batch, in this order.

        Args:
            seed, epoch: of the run.
            views: (B,) what the batch shows.
        """
        draws = uniform(seed, epoch, views, len(self.layers) * DRAWS, AUGMENT).reshape(len(views), -1, DRAWS)
        for number, ops in enumerate(self.layers):
            choice = (draws[:, number if self._independent else 0, 0] * len(ops)).astype(np.int64)
            _, whether, magnitude, sign, more = draws[:, number].T
            for index, op in enumerate(ops):
                if op is None:
                    continue
                rows = np.flatnonzero((choice == index) & (whether < op.prob))
                if len(rows) == 0:
                    continue
                level = self._levels(op, magnitude[rows])
                argument = ARGUMENTS[op.name]
                signs = np.where(sign[rows] < 0.5, -1.0, 1.0)
                yield Step(op.name, rows, argument(level, signs, more[rows]) if argument else None)

    @staticmethod
    def _levels(op: AugmentOp, draws: np.ndarray) -> np.ndarray:
        """Magnitudes (n,) of an operation: fixed, normal around it, or uniform up to it (mstd 100 and more)."""
        if op.magnitude_std == math.inf:
            levels = op.magnitude * draws
        elif op.magnitude_std > 0:
            levels = op.magnitude + op.magnitude_std * normal(draws)
        else:
            levels = np.full(len(draws), float(op.magnitude))
        return np.clip(levels, 0, op.magnitude_max or DENOMINATOR)
