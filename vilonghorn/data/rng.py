"""Random numbers that depend on (seed, epoch, view) alone, and which views of the samples an epoch shows to which rank.

A view is one showing of a sample: with repeated augmentation a sample has several in an epoch, each augmented in its
own way. Its number holds both, so that it can stand wherever a sample index can.
"""

from __future__ import annotations

import numpy as np

VIEW = 1 << 40  # view = sample + repetition * VIEW: a view without repetition is its sample's index
# Where in a view's stream each user's draws begin, so that none takes another's.
CROP, AUGMENT, JITTER, ERASE = 0, 64, 128, 192


def sample_of(views: np.ndarray) -> np.ndarray:
    """Sample indices of views, of any shape."""
    return views % VIEW


def _mix(x: np.ndarray) -> np.ndarray:
    """The output function of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) on uint64, whose overflow is meant."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniform(seed: int, epoch: int, views: np.ndarray, draws: int, start: int = 0) -> np.ndarray:
    """Uniform numbers in [0, 1) for each view: SplitMix64 streams keyed by (seed, epoch, view).

    Args:
        seed, epoch: integers.
        views: (B,) views, or sample indices.
        draws: numbers for each view.
        start: numbers of the stream to pass over.

    Returns:
        (B, draws) float64.
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    key = np.zeros(len(views), np.uint64)
    for part in (np.int64(seed), np.int64(epoch), np.asarray(views).astype(np.int64)):
        key = _mix((key ^ np.asarray(part).astype(np.uint64)) + golden)
    stream = key[:, None] + golden * np.arange(start + 1, start + draws + 1, dtype=np.uint64)
    return (_mix(stream) >> np.uint64(11)) * 2.0**-53


def training_order(num_samples: int, seed: int, epoch: int, repeats: int = 1) -> np.ndarray:
    """The views of a training epoch in their order: all samples shuffled, each `repeats` times in a row, cut off.

    An epoch has as many views as there are samples, so with repeats it shows 1 / repeats of them (repeated
    augmentation, Hoffer et al., CVPR 2020, in the form of DeiT's sampler). Dealt out to ranks in turn, the views of one
    sample land on neighbouring ranks.

    Returns:
        (num_samples,) int64.
    """
    order = np.random.default_rng([seed, epoch]).permutation(num_samples)
    shown = np.arange(num_samples)
    return order[shown // repeats] + shown % repeats * VIEW
