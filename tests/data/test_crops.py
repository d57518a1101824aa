"""Crops stay inside their images, follow the law they are meant to, and depend on nothing but (seed, epoch, sample)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vilonghorn.data.rng import uniform

ffcv = pytest.importorskip("vilonghorn.data.loaders.ffcv", exc_type=ImportError)

sides = st.integers(2, 600)


@given(seed=st.integers(0, 2**31), height=sides, width=sides, low=st.floats(0.01, 1), squeeze=st.floats(0.1, 1))
def test_random_crops_are_not_empty_and_lie_inside(seed, height, width, low, squeeze):
    draws = uniform(seed, 3, np.arange(50), 4 * ffcv.ATTEMPTS)
    heights, widths = np.full(50, height), np.full(50, width)
    top, bottom, left, right = ffcv.random_crops(draws, heights, widths, (low, 1.0), (squeeze, 1 / squeeze)).T
    assert (0 <= top).all() and (top < bottom).all() and (bottom <= height).all()
    assert (0 <= left).all() and (left < right).all() and (right <= width).all()


def test_areas_and_aspect_ratios_follow_the_law_of_random_resized_crop():
    draws = uniform(5, 0, np.arange(20000), 4 * ffcv.ATTEMPTS)
    size = np.full(20000, 4000)
    top, bottom, left, right = ffcv.random_crops(draws, size, size, (0.2, 0.5), (3 / 4, 4 / 3)).T
    height, width = bottom - top, right - left
    area, ratio = height * width / 4000**2, np.log(width / height)
    assert abs(area.mean() - 0.35) < 0.004 and 0.199 < area.min() and area.max() < 0.501
    assert abs(ratio.mean()) < 0.006 and abs(np.abs(ratio).max() - np.log(4 / 3)) < 0.002
    assert abs((top / (4000 - height)).mean() - 0.5) < 0.01


def test_where_no_attempt_fits_the_centre_is_taken():
    draws = np.full((1, 4 * ffcv.ATTEMPTS), 0.999)
    crop = ffcv.random_crops(draws, np.array([10]), np.array([200]), (1.0, 1.0), (3 / 4, 4 / 3))
    assert crop.tolist() == [[0, 10, 93, 106]]
