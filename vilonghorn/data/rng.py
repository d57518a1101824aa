"""Random numbers that depend on (seed, epoch, view) alone, and the order of a training epoch.

With repeated augmentation, a sample has several views in an epoch, each augmented differently. The number of a view
encodes sample and repetition.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

VIEW = 1 << 40  # view = sample + repetition * VIEW
# Offsets in the stream of a view, by use; the ranges do not overlap.
CROP, AUGMENT, JITTER, ERASE = 0, 64, 128, 192


def sample_of(views: np.ndarray) -> np.ndarray:
    """Sample indices of views, of any shape."""
    return views % VIEW


def _mix(x: np.ndarray) -> np.ndarray:
    """The output function of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) on uint64, modulo 2**64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniform(seed: int, epoch: int, views: np.ndarray, count: int, start: int = 0) -> np.ndarray:
    """Uniform numbers in [0, 1), (B, count) float64: SplitMix64 streams keyed by (seed, epoch, view).

    `views` (B,) are views, or sample indices. `start` numbers of each stream are skipped.
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    key = np.zeros(len(views), np.uint64)
    for part in (np.int64(seed), np.int64(epoch), np.asarray(views).astype(np.int64)):
        key = _mix((key ^ np.asarray(part).astype(np.uint64)) + golden)
    stream = key[:, None] + golden * np.arange(start + 1, start + count + 1, dtype=np.uint64)
    return (_mix(stream) >> np.uint64(11)) * 2.0**-53


def training_order(num_samples: int, seed: int, epoch: int, repeats: int = 1) -> np.ndarray:
    """The views (num_samples,) int64 of a training epoch: shuffled samples, each `repeats` times in a row.

    An epoch covers 1 / repeats of the samples (repeated augmentation, Hoffer et al., CVPR 2020, as in DeiT's sampler).
    Rank r of n takes every n-th view from r on, so that the views of a sample go to neighbouring ranks.
    """
    order = np.random.default_rng([seed, epoch]).permutation(num_samples)
    shown = np.arange(num_samples)
    return order[shown // repeats] + shown % repeats * VIEW


@contextmanager
def seeded(seed: int, generator: torch.Generator = torch.default_generator) -> Iterator[None]:
    """Seeds Python's generator and one of torch, from which timm's transforms draw, and restores them."""
    python, tensors = random.getstate(), generator.get_state()
    random.seed(seed)
    generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(python)
        generator.set_state(tensors)
