"""Draws depend on nothing but (seed, epoch, view) and are uniform; orders show what they are meant to show."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vilonghorn.data.rng import VIEW, sample_of, training_order, uniform


def test_draws_are_uniform_and_differ_by_seed_epoch_and_sample():
    draws = uniform(0, 0, np.arange(20000), 4)
    counts = np.stack([np.histogram(column, 10, (0, 1))[0] for column in draws.T])
    assert np.abs(counts - 2000).max() < 250  # 5.9 standard deviations of a bin
    assert np.abs(np.corrcoef(draws.T) - np.eye(4)).max() < 0.04
    assert len(np.unique(draws)) == draws.size
    assert not (uniform(1, 0, np.arange(20000), 4) == draws).any()
    assert not (uniform(0, 1, np.arange(20000), 4) == draws).any()
    assert not (uniform(0, 0, np.arange(20000) + VIEW, 4) == draws).any()
    assert (uniform(0, 0, np.arange(20000), 3, start=1) == draws[:, 1:]).all()


@given(samples=st.integers(1, 300), repeats=st.integers(1, 5), seed=st.integers(0, 99))
def test_repeated_augmentation_shows_each_sample_of_an_epoch_in_a_row_as_different_views(samples, repeats, seed):
    views = training_order(samples, seed, 0, repeats)
    assert len(views) == samples and len(np.unique(views)) == samples
    shown, order = sample_of(views), training_order(samples, seed, 0)
    assert (np.sort(order) == np.arange(samples)).all()
    assert (shown == np.repeat(order, repeats)[:samples]).all()
    assert (views // VIEW == np.arange(samples) % repeats).all()
