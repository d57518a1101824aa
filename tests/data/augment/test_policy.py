"""What is drawn for a batch has the law of timm's own policies, which here write down what they would do."""

import random
from collections import Counter, defaultdict

import numpy as np
import pytest
from scipy.stats import chisquare, ks_2samp, kstest
from timm.data import auto_augment as timms

from vilonghorn.data.augment import jitter
from vilonghorn.data.augment.policy import ARGUMENTS, Policy

MEAN = (0.485, 0.456, 0.406)
COUNT = 10000
NAMES = ["rand-m9-mstd0.5-inc1", "rand-m7-mstd101-inc1", "rand-m14-mmax20-inc1", "original-mstd0.5"]


def ours(name):
    """What is done to each of COUNT images: a list of (operation, argument or None)."""
    done = [[] for _ in range(COUNT)]
    for op, rows, arguments in Policy(name, MEAN).plan(0, 0, np.arange(COUNT)):
        for row, argument in zip(rows, [None] * len(rows) if arguments is None else arguments, strict=True):
            done[row].append((op, argument))
    return done


def theirs(name):
    """The same of timm, whose operations are made to note their arguments instead of changing an image."""
    make = timms.rand_augment_transform if name.startswith("rand") else timms.auto_augment_transform
    transform = make(name, {"translate_const": 100, "img_mean": (124, 116, 104)})
    for op in transform.ops if name.startswith("rand") else [op for row in transform.policy for op in row]:
        op.aug_fn = lambda done, *arguments, op=op, **_: [*done, (op.name, *(arguments or [None]))]
    random.seed(1), np.random.seed(1)
    return [transform([]) for _ in range(COUNT)]


@pytest.mark.parametrize("name", NAMES)
def test_operations_their_pairs_and_their_arguments_have_timms_distribution(name):
    a, b = ours(name), theirs(name)
    for what in (lambda done: len(done), lambda done: tuple(op for op, _ in done[:2])):
        counts = [Counter(map(what, done)) for done in (a, b)]
        kinds = [kind for kind in counts[0] | counts[1] if counts[0][kind] + counts[1][kind] >= 20]
        seen = np.array([[count[kind] for kind in kinds] for count in counts], float)
        assert seen.sum() > 1.8 * COUNT
        expected = np.outer(seen.sum(1), seen.sum(0)) / seen.sum()
        assert chisquare(seen.ravel(), expected.ravel(), ddof=len(kinds), sum_check=False).pvalue > 1e-4
    values = [defaultdict(list), defaultdict(list)]
    for side, done in zip(values, (a, b)):
        for op, argument in (step for steps in done for step in steps):
            side[op].append(argument)
    assert set(values[0]) == set(values[1])
    for op in values[0]:
        if ARGUMENTS[op] is None:
            assert {*values[0][op], *values[1][op]} == {None}
        else:
            assert ks_2samp(*(np.round(side[op], 9) for side in values)).pvalue > 1e-4


@pytest.mark.parametrize("name", [name for name in ARGUMENTS if ARGUMENTS[name] and name != "GaussianBlurRand"])
def test_an_argument_is_timms_for_every_magnitude(name):
    for level in np.linspace(0, 10, 21):
        expected = {round(timms.LEVEL_TO_ARG[name](level, {})[0], 9) for _ in range(24)}
        found = {round(float(ARGUMENTS[name](np.array([level]), sign, 0.3)[0]), 9) for sign in (-1.0, 1.0)}
        assert found == expected


def test_three_augment_does_one_of_three_things_to_every_image():
    done = ours("3a")
    assert all(len(steps) == 1 for steps in done)
    counts = Counter(steps[0][0] for steps in done)
    assert set(counts) == {"Solarize", "Desaturate", "GaussianBlurRand"}
    assert chisquare(list(counts.values())).pvalue > 1e-4
    values = {name: [steps[0][1] for steps in done if steps[0][0] == name] for name in counts}
    assert set(values["Solarize"]) == {128} and set(values["Desaturate"]) == {1.0}
    assert kstest(values["GaussianBlurRand"], "uniform", (0.1, 1.9)).pvalue > 1e-4


def test_jitter_has_torchvisions_law():
    factors, order = jitter(0.3, 0, 0, np.arange(COUNT))
    assert all(kstest(column, "uniform", (0.7, 0.6)).pvalue > 1e-4 for column in factors.T)
    assert np.abs(np.corrcoef(factors.T) - np.eye(3)).max() < 0.03
    counts = Counter(map(tuple, order.tolist()))
    assert len(counts) == 6 and chisquare(list(counts.values())).pvalue > 1e-4
